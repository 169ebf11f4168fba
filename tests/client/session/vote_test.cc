// Seal without deciding, the norm, votes, as a session sees them; and steps that could not be kept.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/client/session/scripted_session.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;

class VoteTest : public ScriptedSession {
 protected:
  VoteTest() { options_.seal_timeout = absl::Milliseconds(20); }

  void TellNorm(uint64_t step, uint32_t attempt = 0) {
    v1::TrainResponse response;
    v1::StepNorm& norm = *response.mutable_norm();
    norm.set_step(step);
    norm.set_attempt(attempt);
    norm.set_norm(5);
    norm.add_group_norms(3);
    norm.add_group_norms(4);
    norm.add_unused_parameters("wte");
    norm.set_more_unused_parameters(7);
    fake_->Deliver(response);
  }
  void RefuseVotes(uint64_t step, v1::ErrorReason reason = v1::VOTE_AGAIN) {
    v1::TrainResponse response;
    response.mutable_vote_refused()->set_step(step);
    response.mutable_vote_refused()->set_message("rank 1 votes otherwise");
    response.mutable_vote_refused()->set_reason(reason);
    fake_->Deliver(response);
  }
  // What was sent last.
  v1::TrainRequest Last() { return fake_->sent().back(); }
};

TEST_F(VoteTest, AVoteWithTheSealIsOneMessage) {
  OpenAndBegin();
  EXPECT_EQ(session_->Seal(1, {.apply = false}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Last().seal().vote().abandon());
  Decide(5, false);
  EXPECT_TRUE(session_->Seal(1, {.apply = false}).ok());
  EXPECT_THAT(fake_->names(1), ElementsAre("open", "begin 5", "seal 5 of 1"));
}

TEST_F(VoteTest, ClippingThatCanNeverWorkIsNotSent) {
  OpenAndBegin();
  for (const StepVote& vote :
       {StepVote{.clipping = {.max_norm = -1}}, StepVote{.clipping = {.multipliers = {1}}}}) {
    EXPECT_EQ(session_->Seal(1, vote).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(session_->Vote(vote).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_THAT(fake_->names(1), ElementsAre("open", "begin 5"));
}

TEST_F(VoteTest, VotesThatDifferAreVotedAgainAndTheNewOneIsKept) {
  OpenAndBegin();
  ASSERT_FALSE(session_->Seal(1, SmallVote()).ok());
  TellNorm(5);
  RefuseVotes(5);
  const absl::Status refused = session_->Seal(1, SmallVote()).status();
  // Seal with a vote has voted again by that.
  EXPECT_EQ(refused.code(), absl::StatusCode::kDeadlineExceeded);
  RefuseVotes(5);
  const absl::Status again = session_->Vote(SmallVote()).status();
  EXPECT_EQ(again.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(fake_->names(1), ElementsAre("open", "begin 5", "seal 5 of 1",
                                           "vote 5 after 1 refusals", "vote 5 after 2 refusals"));
  // A new stream is sent the seal, without the vote that was refused, and the last vote.
  v1::Opened opened;
  opened.set_committed_step(4);
  opened.set_open_step(5);
  fake_->opened = {opened};
  fake_->Break(absl::UnavailableError("connection lost"));
  ASSERT_TRUE(fake_->AwaitStream(2, 3));
  EXPECT_THAT(fake_->names(2), ElementsAre("open", "seal 5 of 1", "vote 5"));
  EXPECT_FALSE(fake_->sent()[fake_->sent().size() - 2].seal().has_vote());
  Decide(5, false);
  EXPECT_TRUE(session_->Vote(SmallVote()).ok());
}

TEST_F(VoteTest, ARefusalSaysWhyAndMayBeToDiscard) {
  OpenAndBegin();
  ASSERT_FALSE(session_->Seal(1).ok());
  TellNorm(5);
  std::atomic<bool> told = false;
  std::thread service([&] {
    // As a service does, it refuses each vote: one that is refused between two calls is voted again by the second.
    for (size_t refused = 3; !told;) {
      const size_t sent = fake_->names(1).size();
      if (sent > refused) RefuseVotes(5, v1::DISCARD_AND_REDO);
      refused = sent;
      std::this_thread::yield();
    }
  });
  absl::Status refused = session_->Vote({}).status();
  while (absl::IsDeadlineExceeded(refused)) refused = session_->Vote({}).status();
  told = true;
  service.join();
  EXPECT_TRUE(Refused(refused, absl::StatusCode::kFailedPrecondition, reason::kDiscardAndRedo));
  // Late words of the attempt mean nothing.
  Refuse(5, "another rank has discarded");
  TellNorm(5);
  RefuseVotes(5);
  EXPECT_EQ(session_->Vote({}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(VoteTest, AStepThatCouldNotBeKeptEndsAsASkipWhereverTheRankIs) {
  OpenAndBegin();
  const auto released = std::make_shared<int>(0);  // The session may outlive this function.
  ASSERT_TRUE(PushChunk(0, [released] { ++*released; }).ok());
  Decide(5, false);
  Commit(5);
  ASSERT_TRUE(PushChunk(1, [released] { ++*released; }).ok());
  EXPECT_GE(*released, 1);  // At once.
  ASSERT_TRUE(session_->EndMicroStep(0, {}).ok());
  const absl::StatusOr<StepNorm> norm = session_->Seal(1);
  ASSERT_TRUE(norm.ok()) << norm.status();
  const absl::StatusOr<StepDecision> decision = session_->Vote({});
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_FALSE(decision->applied);
  EXPECT_EQ(decision->skip_reason, "wte is not finite");
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_EQ(session_->committed_step(), 5u);
  ASSERT_TRUE(session_->BeginStep({}).ok());
  EXPECT_THAT(fake_->names(1),
              ElementsAre("open", "begin 5", "gradient 5 chunk 0 [0, 1)", "begin 6"));
}

}  // namespace
}  // namespace ballast::client
