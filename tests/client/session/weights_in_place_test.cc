// Weights that the trainer reads where they are: in memory shared with the service, or the
// session's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/session/shared_session.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

class WeightsInPlaceTest : public SharedSession {
 protected:
  WeightsInPlaceTest() {
    options_.job.update_mode = UpdateMode::kSpeculate;
    options_.seal_timeout = absl::Seconds(5);  // In case a session does not end.
  }

  void Provisional(int chunk, const std::string& bytes) {
    v1::TrainResponse response;
    v1::WeightHeader& header = *response.mutable_weights()->mutable_header();
    header.set_step(5);
    header.set_chunk(static_cast<uint32_t>(chunk));
    header.set_provisional(true);
    fake_->Deliver(response, {bytes.substr(0, 5), bytes.substr(5)});
  }
  void DecideWithDropped(bool applied, std::vector<uint32_t> dropped) {
    v1::TrainResponse response;
    response.mutable_decision()->set_step(5);
    response.mutable_decision()->set_applied(applied);
    response.mutable_decision()->mutable_dropped_chunks()->Add(dropped.begin(), dropped.end());
    fake_->Deliver(response);
  }
  void WriteAll() {
    for (int chunk = 0; chunk < 5; ++chunk) file_.WriteWeights(chunk, WeightsOf(chunk));
  }
  void ExpectReceived() {
    ASSERT_TRUE(session_->Seal(1, SmallVote()).ok());
    ASSERT_TRUE(session_->ReceiveWeights().ok());
    for (int chunk = 0; chunk < 5; ++chunk) EXPECT_EQ(WeightsInPlace(chunk), WeightsOf(chunk));
    std::sort(complete_.begin(), complete_.end());
    EXPECT_EQ(complete_, (std::vector<int>{0, 1, 2, 3, 4}));
  }
};

TEST_F(WeightsInPlaceTest, AreWhereTheServiceWroteThem) {
  OpenAndBegin();
  DecideWithDropped(true, {});
  WriteAll();
  SendSharedWeights(5, {4, 0});
  EXPECT_EQ(complete_, (std::vector<int>{4, 0}));
  SendSharedWeights(5, {1, 2, 3});
  Commit(5);
  ExpectReceived();
}

TEST_F(WeightsInPlaceTest, CountForNothingBeforeTheDecision) {
  OpenAndBegin();
  WriteAll();
  SendSharedWeights(5, {0, 1, 2, 3, 4}, /*provisional=*/true);
  EXPECT_THAT(complete_, testing::IsEmpty());
  DecideWithDropped(true, {1});
  EXPECT_EQ(complete_, (std::vector<int>{0, 2, 3, 4}));
  SendSharedWeights(5, {1});
  Commit(5);
  ExpectReceived();
}

TEST_F(WeightsInPlaceTest, OfADroppedChunkThatDoesNotFollowAreMissing) {
  OpenAndBegin();
  SendSharedWeights(5, {0, 1, 2, 3, 4}, /*provisional=*/true);
  DecideWithDropped(true, {1});
  Commit(5);
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kDataLoss));
}

TEST_F(WeightsInPlaceTest, OfASkippedStepAreNobodys) {
  OpenAndBegin();
  SendSharedWeights(5, {0, 1, 2, 3, 4}, /*provisional=*/true);
  DecideWithDropped(false, {});
  Commit(5);
  ASSERT_TRUE(session_->Seal(1, SmallVote()).ok());
  EXPECT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_THAT(complete_, testing::IsEmpty());
}

TEST_F(WeightsInPlaceTest, MayComeAsPayloadsAllTheSame) {
  OpenAndBegin();
  Provisional(0, WeightsOf(0));
  DecideWithDropped(true, {});
  for (int chunk : {1, 2}) file_.WriteWeights(chunk, WeightsOf(chunk));
  SendSharedWeights(5, {1, 2});
  for (int chunk : {3, 4}) SendWeights(5, chunk, {WeightsOf(chunk)});
  Commit(5);
  ExpectReceived();
}

TEST_F(WeightsInPlaceTest, AreReadThereBetweenSteps) {
  v1::Job ready;
  ready.set_phase(v1::READY);
  fake_->jobs = {ready};
  fake_->read_step = 4;
  for (int chunk = 0; chunk < 5; ++chunk) {
    fake_->stored_weights.emplace_back(chunk, WeightsOf(chunk));
  }
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(session_->ReadWeights().ok());
  for (int chunk = 0; chunk < 5; ++chunk) EXPECT_EQ(WeightsInPlace(chunk), WeightsOf(chunk));
}

TEST_F(WeightsInPlaceTest, AreCopiedToATrainerThatSaysWhere) {
  options_.weights = [this](int chunk) {
    memory_[chunk].resize(chunk == 4 ? 1024 : 512);
    return absl::MakeSpan(reinterpret_cast<std::byte*>(memory_[chunk].data()),
                          memory_[chunk].size());
  };
  OpenAndBegin();
  EXPECT_TRUE(session_->weights_memory(0).empty());
  WriteAll();
  SendSharedWeights(5, {0, 1}, /*provisional=*/true);
  EXPECT_TRUE(memory_.empty());
  DecideWithDropped(true, {});
  SendSharedWeights(5, {2, 3, 4});
  Commit(5);
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  for (int chunk = 0; chunk < 5; ++chunk) EXPECT_EQ(memory_[chunk], WeightsOf(chunk));
}

TEST_F(WeightsInPlaceTest, ThatTheServiceMayNotSendEndTheSession) {
  struct Case {
    std::vector<uint32_t> chunks;
    bool provisional;
    bool decided;
    uint64_t step;
    absl::StatusCode code;
  };
  for (const Case& wrong : std::vector<Case>{
           {{5}, false, true, 5, absl::StatusCode::kDataLoss},
           {{1u << 31}, false, true, 5, absl::StatusCode::kDataLoss},
           {{3, 3}, false, true, 5, absl::StatusCode::kDataLoss},
           {{5}, true, false, 5, absl::StatusCode::kDataLoss},
           {{~0u}, true, false, 5, absl::StatusCode::kDataLoss},
           {{3, 3}, true, false, 5, absl::StatusCode::kDataLoss},
           {{3}, false, false, 5, absl::StatusCode::kInternal},
           {{3}, true, true, 5, absl::StatusCode::kInternal},
           {{3}, false, true, 6, absl::StatusCode::kInternal},
           {{3}, true, false, 4, absl::StatusCode::kInternal},
       }) {
    SCOPED_TRACE(testing::Message()
                 << wrong.chunks.back() << " of step " << wrong.step
                 << (wrong.provisional ? " provisional" : "") << (wrong.decided ? " decided" : ""));
    auto transport = std::make_unique<FakeTransport>();
    transport->attachment = fake_->attachment;
    session_.reset();
    fake_ = transport.get();
    transport_ = std::move(transport);
    OpenAndBegin();
    if (wrong.decided) DecideWithDropped(true, {});
    SendSharedWeights(wrong.step, wrong.chunks, wrong.provisional);
    EXPECT_EQ(session_->ReceiveWeights().code(), wrong.code);
  }
}

TEST_F(WeightsInPlaceTest, AreAnErrorWhereNoMemoryIsShared) {
  fake_->attachment.clear_shared_memory();
  OpenAndBegin();
  DecideWithDropped(true, {});
  SendSharedWeights(5, {0});
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kInternal));
}

TEST_F(WeightsInPlaceTest, OfASessionWithoutSharedMemoryAreInItsOwn) {
  fake_->attachment.clear_shared_memory();
  OpenAndBegin();
  EXPECT_EQ(fake_->sent().at(0).open().update_mode(), v1::SPECULATE);
  for (int chunk : {0, 4}) Provisional(chunk, WeightsOf(chunk));
  DecideWithDropped(true, {});
  for (int chunk : {1, 2, 3}) SendWeights(5, chunk, {WeightsOf(chunk)});
  Commit(5);
  ExpectReceived();
  EXPECT_TRUE(session_->weights_memory(5).empty());
  EXPECT_TRUE(session_->weights_memory(-1).empty());
}

TEST_F(WeightsInPlaceTest, OfARankThatWaitsAreInItsOwnMemoryToo) {
  options_.job.update_mode = UpdateMode::kWait;
  fake_->attachment.clear_shared_memory();
  OpenAndBegin();
  EXPECT_EQ(fake_->sent().at(0).open().update_mode(), v1::UPDATE_MODE_UNSPECIFIED);
  DecideWithDropped(true, {});
  for (int chunk = 0; chunk < 5; ++chunk) SendWeights(5, chunk, {WeightsOf(chunk)});
  Commit(5);
  ExpectReceived();
}

}  // namespace
}  // namespace ballast::client
