// A session that takes back what it has given, over a scripted service.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/session/scripted_session.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

using testing::ElementsAre;

class DiscardTest : public ScriptedSession {
 protected:
  DiscardTest() {
    options_.window_bytes = 1 << 20;
    fake_->attachment.set_instance_id("the service");
  }
  void SetUp() override { testing::internal::CaptureStderr(); }
  void TearDown() override {
    session_.reset();
    testing::internal::GetCapturedStderr();
  }

  // Calls `call` when the message has been sent on the stream of this number.
  std::thread When(const std::string& message, const std::function<void()>& call,
                   size_t stream = 1) {
    return std::thread([=, this] {
      while (fake_->streams() < stream || fake_->names(stream).empty() ||
             fake_->names(stream).back() != message) {
        std::this_thread::yield();
      }
      call();
    });
  }
  absl::Status Discard(uint64_t step = 5, uint32_t attempt = 0) {
    const std::string message =
        absl::StrCat("discard ", step, attempt == 0 ? "" : absl::StrCat(" attempt ", attempt));
    std::thread service = When(message, [=, this] { TellDiscarded(step, attempt + 1); });
    const absl::Status status = session_->Discard();
    service.join();
    return status;
  }
  static v1::Opened At(uint32_t attempt, uint64_t open_step) {
    v1::Opened opened;
    opened.set_committed_step(4);
    opened.set_open_step(open_step);
    opened.set_attempt(attempt);
    return opened;
  }
};

TEST_F(DiscardTest, EndsTheAttemptAndTheNextCarriesItsNumber) {
  OpenAndBegin();
  std::atomic<int> released = 0;
  ASSERT_TRUE(PushChunk(0, [&] { ++released; }).ok());
  fake_->LetGo();
  EXPECT_EQ(released, 0);
  ASSERT_TRUE(Discard().ok());
  EXPECT_EQ(released, 1);
  // Nothing is open until the next attempt is begun.
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(session_->Seal(1, SmallVote()).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(session_->BeginStep({.scale = {.loss_scale = 8}}).ok());
  ASSERT_TRUE(PushChunk(1).ok());
  ASSERT_TRUE(session_->EndMicroStep(0, {}).ok());
  std::thread service = When("seal 5 attempt 1 of 1", [&] { Decide(5, false); });
  EXPECT_TRUE(session_->Seal(1, SmallVote()).ok());
  service.join();
  Commit(5);
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  ASSERT_TRUE(session_->BeginStep({}).ok());
  EXPECT_THAT(fake_->names(1),
              ElementsAre("open", "begin 5", "gradient 5 chunk 0 [0, 1)", "discard 5",
                          "begin 5 attempt 1", "gradient 5 attempt 1 chunk 1 [0, 1)",
                          "end 5 attempt 1 micro-step 0", "seal 5 attempt 1 of 1", "begin 6"));
}

TEST_F(DiscardTest, ThatIsNotAnsweredInTimeIsWaitedForAgain) {
  options_.seal_timeout = absl::Milliseconds(1);
  OpenAndBegin();
  ASSERT_EQ(session_->Seal(1, SmallVote()).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Refused(session_->Discard(), absl::StatusCode::kDeadlineExceeded));
  for (const absl::Status& status :
       {session_->Seal(1, SmallVote()).status(), session_->EndMicroStep(0, {}),
        session_->BeginStep({}), session_->ReadWeights()}) {
    EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
  }
  TellDiscarded(5, 1);
  EXPECT_TRUE(session_->BeginStep({}).ok());
  EXPECT_THAT(fake_->names(1),
              ElementsAre("open", "begin 5", "seal 5 of 1", "discard 5", "begin 5 attempt 1"));
}

TEST_F(DiscardTest, ALateRefusalOfTheOldSealLeavesTheNewOneWhereItIs) {
  options_.seal_timeout = absl::Milliseconds(1);
  OpenAndBegin();
  ASSERT_EQ(session_->Seal(1, SmallVote()).status().code(), absl::StatusCode::kDeadlineExceeded);
  std::thread service = When("discard 5", [&] { TellDiscarded(5, 1); });
  while (!session_->Discard().ok()) continue;
  service.join();
  ASSERT_TRUE(session_->BeginStep({}).ok());
  ASSERT_EQ(session_->Seal(1, SmallVote()).status().code(), absl::StatusCode::kDeadlineExceeded);
  Refuse(5, "rank 1 has discarded attempt 0", /*attempt=*/0);
  EXPECT_EQ(session_->Seal(1, SmallVote()).status().code(), absl::StatusCode::kDeadlineExceeded);
  // And it is still the seal that a new stream is sent.
  fake_->opened = {At(1, 5)};
  fake_->Break(absl::UnavailableError("connection lost"));
  ASSERT_TRUE(fake_->AwaitStream(2, 2));
  EXPECT_THAT(fake_->names(2), ElementsAre("open", "seal 5 attempt 1 of 1"));
  Refuse(5, "something is missing", /*attempt=*/1);
  ASSERT_EQ(session_->Seal(1, SmallVote()).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(fake_->names(2),
              ElementsAre("open", "seal 5 attempt 1 of 1", "seal 5 attempt 1 of 1"));
}

TEST_F(DiscardTest, IsSentAgainOnANewStreamWhateverTheServiceHasOfIt) {
  options_.seal_timeout = absl::Milliseconds(1);
  struct Case {
    v1::Opened opened;
    std::vector<std::string> sent;
  };
  const std::vector<Case> cases = {
      // It has nothing of the attempt;
      {At(0, 0), {"open", "begin 5", "gradient 5 chunk 0 [0, 1)", "discard 5"}},
      // it has begun it;
      {At(0, 5), {"open", "gradient 5 chunk 0 [0, 1)", "discard 5"}},
      // it has discarded it, and the answer is lost.
      {At(1, 0), {"open", "discard 5"}}};
  for (const Case& each : cases) {
    auto transport = std::make_unique<FakeTransport>();
    transport->attachment = fake_->attachment;
    session_.reset();
    fake_ = transport.get();
    transport_ = std::move(transport);
    OpenAndBegin();
    std::atomic<int> released = 0;
    ASSERT_TRUE(PushChunk(0, [&] { ++released; }).ok());
    ASSERT_TRUE(session_->EndMicroStep(0, {}).ok());
    // The seal goes with the attempt.
    ASSERT_EQ(session_->Seal(1, SmallVote()).status().code(), absl::StatusCode::kDeadlineExceeded);
    fake_->opened = {each.opened};
    fake_->opened[0].set_micro_steps_ended(1);
    std::thread broken =
        When("discard 5", [&] { fake_->Break(absl::UnavailableError("connection lost")); });
    std::thread service = When(
        "discard 5", [&] { TellDiscarded(5, 1); }, /*stream=*/2);
    absl::Status discarded = session_->Discard();
    while (absl::IsDeadlineExceeded(discarded)) discarded = session_->Discard();
    broken.join();
    service.join();
    ASSERT_TRUE(discarded.ok()) << discarded;
    std::vector<std::string> sent = fake_->names(2);
    std::erase(sent, "end 5 micro-step 0");  // Of a step that it has not begun.
    EXPECT_EQ(sent, each.sent);
    fake_->LetGo();
    EXPECT_EQ(released, 1);
    ASSERT_TRUE(session_->BeginStep({}).ok());
    EXPECT_EQ(fake_->names(2).back(), "begin 5 attempt 1");
  }
}

TEST_F(DiscardTest, ThatNobodyAskedForEndsTheSession) {
  OpenAndBegin();
  ASSERT_TRUE(PushChunk(0).ok());
  TellDiscarded(5, 1);
  EXPECT_TRUE(Refused(PushChunk(1), absl::StatusCode::kInternal));
}

TEST_F(DiscardTest, VoidsTheWeightsThatCameAhead) {
  options_.job.update_mode = UpdateMode::kSpeculate;
  options_.weights = nullptr;
  std::vector<int> dropped;
  std::vector<int> complete;
  options_.on_dropped_weights = [&](int chunk) { dropped.push_back(chunk); };
  options_.on_weights = [&](int chunk) { complete.push_back(chunk); };
  OpenAndBegin();
  const auto provisional = [&](int chunk, const std::string& bytes) {
    v1::TrainResponse response;
    v1::WeightHeader& header = *response.mutable_weights()->mutable_header();
    header.set_step(5);
    header.set_chunk(static_cast<uint32_t>(chunk));
    header.set_provisional(true);
    fake_->Deliver(response, {bytes});
  };
  provisional(0, std::string(512, 'X'));
  provisional(1, std::string(512, 'X'));
  ASSERT_TRUE(Discard().ok());
  EXPECT_THAT(dropped, ElementsAre(0, 1));
  ASSERT_TRUE(session_->BeginStep({}).ok());
  provisional(1, WeightsOf(1));  // Those of the next attempt are no repeat.
  std::thread service = When("seal 5 attempt 1 of 1", [&] {
    Decide(5, true);
    for (const int chunk : {0, 2, 3, 4}) SendWeights(5, chunk, {WeightsOf(chunk)});
    Commit(5);
  });
  EXPECT_TRUE(session_->Seal(1, SmallVote()).ok());
  service.join();
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_THAT(complete, ElementsAre(1, 0, 2, 3, 4));
  EXPECT_THAT(dropped, ElementsAre(0, 1));
}

}  // namespace
}  // namespace ballast::client
