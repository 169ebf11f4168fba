// Weights that arrive before the decision: the memory for them, and a session that uses it.
#include "client/session/weights_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "tests/client/session/scripted_session.h"
#include "tests/support/address_limit.h"
#include "tests/support/messages.h"
#include "tests/support/sanitizers.h"

namespace ballast::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class ProvisionalWeightsTest : public ScriptedSession {
 protected:
  ProvisionalWeightsTest() {
    options_.job.update_mode = UpdateMode::kSpeculate;
    options_.window_bytes = 1 << 20;
    options_.on_weights = [this](int chunk) { ++on_weights_[chunk]; };
  }

  void Provisional(int chunk, const std::string& bytes, uint64_t step = 5) {
    v1::TrainResponse response;
    v1::WeightHeader& header = *response.mutable_weights()->mutable_header();
    header.set_step(step);
    header.set_chunk(static_cast<uint32_t>(chunk));
    header.set_provisional(true);
    fake_->Deliver(response, {bytes.substr(0, 5), "", bytes.substr(5)});
  }
  void DecideWithDropped(bool applied, std::vector<uint32_t> dropped, uint64_t step = 5) {
    v1::TrainResponse response;
    response.mutable_decision()->set_step(step);
    response.mutable_decision()->set_applied(applied);
    response.mutable_decision()->mutable_dropped_chunks()->Add(dropped.begin(), dropped.end());
    fake_->Deliver(response);
  }

  std::map<int, int> on_weights_;
};

TEST_F(ProvisionalWeightsTest, AreNotReservedBeyondWhatIsAvailable) {
  const Layout layout = Layout::Create(options_.job.layout).value();
  const int64_t needed_bytes = 4 * 512 + 1024;
  EXPECT_TRUE(WeightsMemory::Reserve(layout, options_.job.groups, 0, needed_bytes).ok());
  EXPECT_TRUE(Refused(WeightsMemory::Reserve(layout, options_.job.groups, 0, needed_bytes - 1),
                      absl::StatusCode::kResourceExhausted));
}

TEST_F(ProvisionalWeightsTest, AreKeptFromTheTrainersMemoryUntilTheDecision) {
  OpenAndBegin();
  EXPECT_EQ(fake_->sent().at(0).open().update_mode(), v1::SPECULATE);
  for (int chunk = 0; chunk < 5; ++chunk) Provisional(chunk, WeightsOf(chunk));
  EXPECT_TRUE(memory_.empty());
  EXPECT_TRUE(on_weights_.empty());
  DecideWithDropped(true, {});
  for (int chunk = 0; chunk < 5; ++chunk) {
    EXPECT_EQ(memory_[chunk], WeightsOf(chunk));
    EXPECT_EQ(on_weights_[chunk], 1);
  }
  Commit(5);
  ASSERT_TRUE(session_->Seal(1, SmallVote()).ok());
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_EQ(session_->committed_step(), 5u);
}

TEST_F(ProvisionalWeightsTest, OfDroppedChunksNeverReachTheTrainer) {
  OpenAndBegin();
  for (int chunk : {0, 1, 2}) Provisional(chunk, std::string(512, 'X'));
  DecideWithDropped(true, {1});
  EXPECT_EQ(memory_.count(1), 0u);
  EXPECT_EQ(memory_[0], std::string(512, 'X'));
  for (int chunk : {1, 3, 4}) SendWeights(5, chunk, {WeightsOf(chunk)});
  Commit(5);
  ASSERT_TRUE(session_->Seal(1, SmallVote()).ok());
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_EQ(memory_[1], WeightsOf(1));
  EXPECT_EQ(on_weights_, (std::map<int, int>{{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}}));
}

TEST_F(ProvisionalWeightsTest, ADroppedChunkThatDoesNotFollowIsMissing) {
  OpenAndBegin();
  for (int chunk = 0; chunk < 5; ++chunk) Provisional(chunk, WeightsOf(chunk));
  DecideWithDropped(true, {1, 2});
  Commit(5);
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kDataLoss));
}

TEST_F(ProvisionalWeightsTest, AWeightThatStayedDoesNotComeAgain) {
  OpenAndBegin();
  Provisional(0, WeightsOf(0));
  DecideWithDropped(true, {});
  SendWeights(5, 0, {std::string(512, 'X')});
  EXPECT_EQ(memory_[0], WeightsOf(0));
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kDataLoss));
}

TEST_F(ProvisionalWeightsTest, ThatComeTwiceAreDataLoss) {
  OpenAndBegin();
  Provisional(3, WeightsOf(3));
  Provisional(3, WeightsOf(3));
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kDataLoss));
}

TEST_F(ProvisionalWeightsTest, OfAnotherSizeAreDataLoss) {
  OpenAndBegin();
  Provisional(4, std::string(512, 'x'));
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kDataLoss));
}

TEST_F(ProvisionalWeightsTest, OfNoChunkOfTheRankAreDataLoss) {
  OpenAndBegin();
  Provisional(5, std::string(512, 'x'));
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kDataLoss));
}

TEST_F(ProvisionalWeightsTest, AfterTheDecisionAreAnError) {
  OpenAndBegin();
  DecideWithDropped(true, {});
  Provisional(0, WeightsOf(0));
  EXPECT_TRUE(memory_.empty());
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kInternal));
}

TEST_F(ProvisionalWeightsTest, OfAnotherStepAreAnError) {
  OpenAndBegin();
  Provisional(0, WeightsOf(0), 6);
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kInternal));
}

TEST_F(ProvisionalWeightsTest, AreAnErrorForARankThatWaits) {
  options_.job.update_mode = UpdateMode::kWait;
  OpenAndBegin();
  EXPECT_EQ(fake_->sent().at(0).open().update_mode(), v1::UPDATE_MODE_UNSPECIFIED);
  Provisional(0, WeightsOf(0));
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kInternal));
}

// A trainer that reads weights in place is notified of each arrival, in this order.
class ToldWeightsTest : public ProvisionalWeightsTest {
 protected:
  ToldWeightsTest() {
    options_.weights = nullptr;
    options_.on_provisional_weights = [this](int chunk) { Note("provisional", chunk); };
    options_.on_dropped_weights = [this](int chunk) { Note("dropped", chunk); };
    options_.on_weights = [this](int chunk) { Note("weights", chunk); };
  }
  void Note(const char* what, int chunk) {
    const absl::Span<const std::byte> lies = session_->weights_memory(chunk);
    told_.push_back(
        absl::StrCat(what, " ", chunk, " ", std::string(1, static_cast<char>(lies[0]))));
  }

  std::vector<std::string> told_;
};

TEST_F(ToldWeightsTest, AreToldAsProvisionalThenAsTheStepsOrAsDropped) {
  OpenAndBegin();
  for (int chunk : {0, 1, 2}) Provisional(chunk, WeightsOf(chunk));
  EXPECT_THAT(told_, ElementsAre("provisional 0 a", "provisional 1 b", "provisional 2 c"));
  told_.clear();
  DecideWithDropped(true, {1});
  EXPECT_THAT(told_, ElementsAre("weights 0 a", "weights 2 c", "dropped 1 b"));
  told_.clear();
  for (int chunk : {1, 3, 4}) SendWeights(5, chunk, {std::string(chunk == 4 ? 1024 : 512, 'N')});
  Commit(5);
  EXPECT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_THAT(told_, ElementsAre("weights 1 N", "weights 3 N", "weights 4 N"));
}

TEST_F(ToldWeightsTest, OfASkippedStepAreDropped) {
  OpenAndBegin();
  for (int chunk : {0, 3}) Provisional(chunk, WeightsOf(chunk));
  told_.clear();
  DecideWithDropped(false, {});
  Commit(5);
  EXPECT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_THAT(told_, ElementsAre("dropped 0 a", "dropped 3 d"));
}

TEST_F(ToldWeightsTest, AreNotToldAsProvisionalToATrainerWithMemoryOfItsOwn) {
  options_.weights = [this](int chunk) {
    memory_[chunk].resize(chunk == 4 ? 1024 : 512);
    return absl::MakeSpan(reinterpret_cast<std::byte*>(memory_[chunk].data()),
                          memory_[chunk].size());
  };
  options_.on_weights = [this](int chunk) { told_.push_back(absl::StrCat("weights ", chunk)); };
  OpenAndBegin();
  for (int chunk : {0, 1}) Provisional(chunk, WeightsOf(chunk));
  DecideWithDropped(true, {1});
  EXPECT_THAT(told_, ElementsAre("weights 0"));
}

class TightMemoryTest : public ProvisionalWeightsTest {
 protected:
  // Opens a session with 4 GiB of weights in a process that may use 1 GiB more.
  absl::Status OpenWithTooLittle() {
    options_.job.layout.parameters[0].shape = {int64_t{1} << 31};
    options_.job.layout.chunk_elements = kMaxChunkElements;
    options_.job.layout.partitions =
        PartitionsOf(MakeBuckets(FlatElements(options_.job.layout), 1, kMaxChunkElements), 1);
    const ScopedAddressLimit tight(int64_t{1} << 30);
    testing::internal::CaptureStderr();
    const absl::Status opened = Open();
    log_ = testing::internal::GetCapturedStderr();
    return opened;
  }

  std::string log_;
};

TEST_F(TightMemoryTest, WithoutMemoryForProvisionalWeightsTheRankWaits) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's shadow memory leaves no room for a limit";
  const absl::Status opened = OpenWithTooLittle();
  ASSERT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(fake_->sent().at(0).open().update_mode(), v1::UPDATE_MODE_UNSPECIFIED);
  EXPECT_THAT(log_, AllOf(HasSubstr("[warning] job gpt rank 0: there is no memory for 4294"),
                          HasSubstr("this rank's chunks wait for the decision")));
}

TEST_F(TightMemoryTest, WithoutMemoryToReadWeightsInTheSessionIsRefused) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's shadow memory leaves no room for a limit";
  options_.weights = nullptr;
  const absl::Status refused = OpenWithTooLittle();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("4294969344 bytes"));  // And what is available.
}

}  // namespace
}  // namespace ballast::client
