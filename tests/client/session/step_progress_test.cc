#include "client/session/step_progress.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/support/messages.h"

namespace ballast::client {
namespace {

StepDecision DecisionOf(uint64_t step) {
  StepDecision decision;
  decision.step = step;
  decision.applied = true;
  return decision;
}

TEST(StepProgress, RefusesMessagesOfOtherSteps) {
  StepProgress progress;
  progress.Begin(3);
  EXPECT_EQ(progress.Decided(DecisionOf(2)).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(progress.Refused(4, absl::FailedPreconditionError("no")).code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(progress.Committed(4, 0).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(progress.Committed(3, 0).code(), absl::StatusCode::kInternal);  // Not decided.
  EXPECT_TRUE(progress.Decided(DecisionOf(3)).ok());
  EXPECT_TRUE(progress.Committed(3, 0.5).ok());
  EXPECT_EQ(progress.AwaitCommitted(absl::InfiniteDuration()).value(), 0.5);
}

TEST(StepProgress, OverdueNewsOfAwaitedRanksCountsForNothing) {
  StepProgress progress;
  progress.Begin(3);
  progress.Waiting(2, {1});
  EXPECT_TRUE(progress.awaited_ranks().empty());
  progress.Waiting(3, {1});
  EXPECT_EQ(progress.awaited_ranks(), std::vector<int>{1});
  progress.Begin(4);
  EXPECT_TRUE(progress.awaited_ranks().empty());
}

TEST(StepProgress, OneSealIsOutAtATime) {
  StepProgress progress;
  progress.Begin(3);
  EXPECT_TRUE(progress.StartSeal(/*with_vote=*/true));
  EXPECT_FALSE(progress.StartSeal(/*with_vote=*/true));
  EXPECT_TRUE(progress.Refused(3, absl::FailedPreconditionError("no")).ok());
  EXPECT_TRUE(
      Refused(progress.AwaitDecision(absl::Seconds(60)), absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(progress.StartSeal(/*with_vote=*/true));
  EXPECT_EQ(progress.AwaitDecision(absl::ZeroDuration()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  // After a decision no seal is needed, whatever was refused before.
  EXPECT_TRUE(progress.Refused(3, absl::FailedPreconditionError("no")).ok());
  EXPECT_TRUE(progress.Decided(DecisionOf(3)).ok());
  EXPECT_FALSE(progress.StartSeal(/*with_vote=*/true));
}

TEST(StepProgress, ADiscardEndsTheAttemptAndNotTheStep) {
  StepProgress progress;
  progress.Begin(3);
  EXPECT_TRUE(progress.StartSeal(/*with_vote=*/true));
  EXPECT_TRUE(progress.StartDiscard());
  EXPECT_FALSE(progress.StartDiscard());  // It is out.
  EXPECT_TRUE(progress.discarding());
  EXPECT_EQ(progress.AwaitDiscarded(absl::ZeroDuration()).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(progress.Discarded({3, 2}).code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(progress.Discarded({3, 1}).ok());
  EXPECT_TRUE(progress.AwaitDiscarded(absl::ZeroDuration()).ok());
  EXPECT_EQ(progress.at(), StepAttempt(0, 1));
  progress.Begin(3);
  EXPECT_EQ(progress.at(), StepAttempt(3, 1));
  EXPECT_TRUE(progress.StartSeal(/*with_vote=*/true));  // The one before was of another attempt.
  EXPECT_EQ(progress.Discarded({3, 2}).code(), absl::StatusCode::kInternal);  // Unasked.
  EXPECT_TRUE(progress.Decided(DecisionOf(3)).ok());
  EXPECT_FALSE(progress.StartDiscard());
  EXPECT_EQ(progress.AwaitDiscarded(absl::ZeroDuration()).code(),
            absl::StatusCode::kFailedPrecondition);
  progress.End();
  EXPECT_EQ(progress.at(), StepAttempt(0, 0));
}

TEST(StepProgress, ADecisionIsTheAnswerToADiscardThatComesTooLate) {
  StepProgress progress;
  progress.Begin(3);
  EXPECT_TRUE(progress.StartDiscard());
  EXPECT_TRUE(progress.Decided(DecisionOf(3)).ok());
  EXPECT_FALSE(progress.discarding());
  EXPECT_EQ(progress.AwaitDiscarded(absl::InfiniteDuration()).code(),
            absl::StatusCode::kFailedPrecondition);
}

// A step that cannot be kept is skipped, also for a rank that is about to try it again.
TEST(StepProgress, ADecisionBetweenTwoAttemptsIsTheNextOnes) {
  StepProgress progress;
  progress.Begin(3);
  ASSERT_TRUE(progress.StartDiscard());
  ASSERT_EQ(progress.Discarded({3, 1}), absl::OkStatus());
  EXPECT_FALSE(progress.Decided(DecisionOf(4)).ok());
  EXPECT_EQ(progress.Decided(DecisionOf(3)), absl::OkStatus());
  EXPECT_EQ(progress.AwaitDiscarded(absl::InfiniteDuration()), absl::OkStatus());
  EXPECT_EQ(progress.Committed(3, 0), absl::OkStatus());
  progress.Begin(3);
  EXPECT_TRUE(progress.given_up());
  EXPECT_FALSE(progress.StartSeal(/*with_vote=*/false));
  progress.End();
  progress.Begin(4);
  EXPECT_FALSE(progress.given_up());
}

TEST(StepProgress, ALateRefusalOfADiscardedAttemptCountsForNothing) {
  StepProgress progress;
  progress.Begin(3);
  EXPECT_TRUE(progress.StartDiscard());
  EXPECT_TRUE(progress.Discarded({3, 1}).ok());
  EXPECT_TRUE(progress.Refused({3, 0}, absl::FailedPreconditionError("old")).ok());
  progress.Begin(3);
  EXPECT_TRUE(progress.StartSeal(/*with_vote=*/true));
  EXPECT_TRUE(progress.Refused({3, 0}, absl::FailedPreconditionError("old")).ok());
  EXPECT_EQ(progress.AwaitDecision(absl::ZeroDuration()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(progress.StartSeal(/*with_vote=*/true));
  EXPECT_TRUE(progress.Refused({3, 1}, absl::FailedPreconditionError("new")).ok());
  EXPECT_TRUE(Refused(progress.AwaitDecision(absl::InfiniteDuration()),
                      absl::StatusCode::kFailedPrecondition));
  progress.End();
  progress.Begin(4);
  EXPECT_TRUE(progress.Refused({3, 1}, absl::FailedPreconditionError("old")).ok());
  EXPECT_FALSE(progress.Refused({5, 0}, absl::FailedPreconditionError("no such step")).ok());
}

// Of a step that was skipped because it could not be kept: the service's threads overtake each other.
TEST(StepProgress, ARefusalAfterTheDecisionCountsForNothing) {
  StepProgress progress;
  progress.Begin(3);
  EXPECT_TRUE(progress.StartSeal(/*with_vote=*/true));
  EXPECT_TRUE(progress.Decided(DecisionOf(3)).ok());
  EXPECT_TRUE(progress.Refused(3, absl::FailedPreconditionError("late")).ok());
  EXPECT_FALSE(progress.given_up());  // It was sealed, and still counts as that.
  EXPECT_EQ(progress.AwaitDecision(absl::InfiniteDuration()).status(), absl::OkStatus());
  progress.End();
  EXPECT_TRUE(progress.Refused(3, absl::FailedPreconditionError("late")).ok());
  progress.Begin(4);
  EXPECT_TRUE(progress.Refused(3, absl::FailedPreconditionError("late")).ok());
}

TEST(StepProgress, ANormIsToldThoughAnotherRankHasDiscardedTheAttemptSince) {
  StepProgress progress;
  progress.Begin(3);
  EXPECT_TRUE(progress.StartSeal(/*with_vote=*/false));
  EXPECT_TRUE(progress.Normed({.step = 3, .norm = 7}).ok());
  EXPECT_TRUE(progress.Refused(3, absl::FailedPreconditionError("discarded")).ok());
  EXPECT_FALSE(progress.StartSeal(/*with_vote=*/false));  // Which came back after a time limit.
  EXPECT_EQ(progress.AwaitNorm(absl::Seconds(60)).value().norm, 7);
  EXPECT_TRUE(Refused(progress.StartVote(), absl::StatusCode::kFailedPrecondition));
  // A seal after that is another one.
  EXPECT_TRUE(progress.StartSeal(/*with_vote=*/false));
  EXPECT_EQ(progress.AwaitNorm(absl::ZeroDuration()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(StepProgress, ARefusedSealAwaitsNobody) {
  StepProgress progress;
  progress.Begin(3);
  progress.Waiting(3, {1});
  EXPECT_TRUE(progress.Refused(3, absl::FailedPreconditionError("no")).ok());
  EXPECT_TRUE(progress.awaited_ranks().empty());
}

TEST(StepProgress, WhatCameBeforeAFailureCounts) {
  StepProgress progress;
  progress.Begin(3);
  ASSERT_TRUE(progress.Decided(DecisionOf(3)).ok());
  progress.Fail(absl::UnavailableError("gone"));
  progress.Fail(absl::UnavailableError("later"));
  EXPECT_TRUE(progress.AwaitDecision(absl::Seconds(60)).ok());
  EXPECT_TRUE(Refused(progress.AwaitCommitted(absl::Seconds(60)), absl::StatusCode::kUnavailable));
}

TEST(StepProgress, ADecisionWakesTheWaiter) {
  StepProgress progress;
  progress.Begin(3);
  std::thread service([&] { EXPECT_TRUE(progress.Decided(DecisionOf(3)).ok()); });
  EXPECT_EQ(progress.AwaitDecision(absl::Seconds(60)).value().step, 3u);
  service.join();
}

TEST(StepProgress, AnAnswerThatComesBetweenTwoWaitsIsTheSecondOnes) {
  StepProgress progress;
  progress.Begin(5);
  ASSERT_TRUE(progress.StartDiscard());
  EXPECT_TRUE(absl::IsDeadlineExceeded(progress.AwaitDiscarded(absl::ZeroDuration())));
  EXPECT_TRUE(progress.Discarded({5, 1}).ok());
  EXPECT_FALSE(progress.StartDiscard());  // Nothing more is discarded.
  EXPECT_TRUE(progress.AwaitDiscarded(absl::ZeroDuration()).ok());
  EXPECT_EQ(progress.at().attempt, 1u);
  EXPECT_TRUE(progress.StartDiscard());  // The next attempt.
  EXPECT_TRUE(absl::IsDeadlineExceeded(progress.AwaitDiscarded(absl::ZeroDuration())));
  EXPECT_TRUE(progress.Discarded({5, 2}).ok());
  progress.Begin(5);  // So does the beginning of the attempt after it.
  EXPECT_TRUE(progress.StartDiscard());
}

}  // namespace
}  // namespace ballast::client
