// Sealing without deciding, the norm, votes; steps that cannot be kept.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class JobVoteTest : public JobDriverTest {
 protected:
  static JobSpec Spec(const std::string& name, UpdateMode mode = UpdateMode::kWait) {
    JobSpec spec = MakeJobSpec(
        {.group_sizes = {{1000, 24}, {3000}}, .world_size = 2, .chunk_elements = 512}, name);
    spec.update_mode = mode;
    return spec;
  }
  // All but the seals.
  static void Give(JobDriver& driver, uint64_t seed, const StepSettings& settings = {}) {
    driver.BeginAll(settings);
    driver.SendAll(seed, 0, /*final=*/true);
    driver.EndMicroStepAll(0);
  }
};

TEST_F(JobVoteTest, ThatALookAtTheNormChangesNoBit) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    const std::string name = mode == UpdateMode::kWait ? "wait" : "speculate";
    JobDriver looks = Make(Spec(name + "-looks", mode));
    JobDriver at_once = Make(Spec(name + "-at-once", mode));
    for (uint64_t step = 1; step <= 4; ++step) {
      const StepVote vote = {.clipping = {.max_norm = 10.0 * step},
                             .overrides = {{0, {.lr = 0.01 * step}}},
                             .trainer_state = "after " + std::to_string(step)};
      at_once.SetVote(vote);
      const StepOutcome expected = at_once.Step(step);
      Give(looks, step);
      const StepNorm norm = looks.SealToLook(1);
      EXPECT_EQ(norm.norm, expected.decision.norm);
      EXPECT_THAT(norm.group_norms, SizeIs(2));
      EXPECT_EQ(looks.job().Status().phase, JobPhase::kVoting);
      EXPECT_EQ(looks.job().Status().committed_step, step - 1);
      EXPECT_EQ(looks.VoteAll(vote).decision, expected.decision);
      EXPECT_EQ(looks.job().StateHash(), at_once.job().StateHash());
      EXPECT_EQ(looks.job().Status().trainer_state, *vote.trainer_state);
      EXPECT_EQ(looks.job().Status().hyper_parameters[0].lr, 0.01 * step);
    }
  }
}

TEST_F(JobVoteTest, OfASpikeThatIsDiscardedNothingMoves) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    const std::string name = mode == UpdateMode::kWait ? "wait" : "speculate";
    JobDriver driver = Make(Spec(name + "-spiked", mode));
    JobDriver calm = Make(Spec(name + "-calm", mode));
    driver.Step(1);
    calm.Step(1);
    const std::string before = driver.job().StateHash();
    Give(driver, 7, {.scale = {.loss_scale = 1e-3}});
    if (mode == UpdateMode::kSpeculate) {
      driver.listener(0).WaitForProvisional(driver.layout().chunks_of_rank(0).size());
    }
    EXPECT_GT(driver.SealToLook(1).norm, 1000);
    EXPECT_EQ(driver.job().StateHash(), before);
    ASSERT_TRUE(driver.Discard(0));
    EXPECT_EQ(driver.job().Status().phase, JobPhase::kOpen);
    ASSERT_THAT(driver.listener(1).refusals(), SizeIs(1));
    EXPECT_EQ(ReasonOf(driver.listener(1).refusals()[0]), reason::kDiscardAndRedo);
    // A vote that is on its way comes to nothing, and is told so.
    driver.Vote(1, {});
    ASSERT_THAT(driver.listener(1).vote_refusals(), SizeIs(1));
    EXPECT_EQ(ReasonOf(driver.listener(1).vote_refusals()[0]), reason::kDiscardAndRedo);
    ASSERT_TRUE(driver.Discard(1));
    EXPECT_EQ(driver.job().StateHash(), before);
    Give(driver, 2);
    driver.SealToLook(1);
    EXPECT_EQ(driver.VoteAll({}).decision, calm.Step(2).decision);
    EXPECT_EQ(driver.job().StateHash(), calm.job().StateHash());
  }
}

TEST_F(JobVoteTest, VotesThatDifferAreVoidAndToldAndTheStepStaysOpen) {
  JobDriver driver = Make(Spec("differ"));
  JobDriver expected = Make(Spec("agree"));
  expected.SetMaxNorm(2);
  const std::string before = driver.job().StateHash();
  // One with its seal, one after a look.
  Give(driver, 1);
  EXPECT_EQ(driver.SealWith(0, 1, StepVote{.clipping = {.max_norm = 1}}), std::nullopt);
  EXPECT_EQ(driver.SealWith(1, 1, std::nullopt), std::nullopt);
  driver.listener(1).WaitForNorm(driver.at(1));
  driver.Vote(1, {.clipping = {.max_norm = 2}});
  for (const int rank : {0, 1}) {
    ASSERT_THAT(driver.listener(rank).vote_refusals(), SizeIs(1));
    EXPECT_THAT(std::string(driver.listener(rank).vote_refusals()[0].message()),
                HasSubstr("rank 1 votes on step 1: max_norm 2 where others have 1 (rank 0)"));
    EXPECT_THAT(driver.listener(rank).norms(), testing::Not(IsEmpty()));
  }
  EXPECT_EQ(driver.job().Status().phase, JobPhase::kVoting);
  EXPECT_EQ(driver.job().StateHash(), before);
  for (const RankProgress& rank : driver.job().Status().ranks) {
    EXPECT_TRUE(rank.sealed);
    EXPECT_FALSE(rank.voted);
  }
  driver.VoteAll({.clipping = {.max_norm = 2}});
  expected.Step(1);
  EXPECT_EQ(driver.job().StateHash(), expected.job().StateHash());
  // Both with their seals.
  Give(driver, 2);
  EXPECT_EQ(driver.SealWith(0, 1, StepVote{.apply = false}), std::nullopt);
  EXPECT_EQ(driver.SealWith(1, 1, StepVote{}), std::nullopt);
  driver.listener(0).WaitForVoteRefusals(2);
  driver.listener(1).WaitForVoteRefusals(2);
  driver.VoteAll({.clipping = {.max_norm = 2}});
  expected.Step(2);
  EXPECT_EQ(driver.job().StateHash(), expected.job().StateHash());
}

TEST_F(JobVoteTest, AnAbandonedStepIsASkipWithItsReasonOnAllRanks) {
  JobDriver driver = Make(Spec("abandons", UpdateMode::kSpeculate));
  driver.Step(1);
  const std::string before = driver.job().StateHash();
  Give(driver, 2);
  const double norm = driver.SealToLook(1).norm;
  driver.VoteAll({.apply = false, .trainer_state = "abandoned"});
  EXPECT_EQ(driver.job().StateHash(), before);
  for (const int rank : {0, 1}) {
    const StepOutcome outcome = driver.listener(rank).outcomes().back();
    EXPECT_FALSE(outcome.decision.apply);
    EXPECT_EQ(outcome.decision.norm, norm);
    EXPECT_THAT(outcome.skip_reason, HasSubstr("voted to abandon"));
  }
  const JobStatus status = driver.job().Status();
  EXPECT_EQ(status.committed_step, 2u);
  EXPECT_EQ(status.skipped_steps, 1u);
  EXPECT_TRUE(status.recent_steps.back().abandoned);
  EXPECT_EQ(status.trainer_state, "abandoned");
}

TEST_F(JobVoteTest, BadVotesAreRefusedAndChangeNothing) {
  JobDriver driver = Make(Spec("bad"));
  const auto code = [&](int rank, StepAttempt at, const StepVote& vote) {
    return driver.stream(rank).Vote(at, vote).code();
  };
  constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code(0, 1, {}), kPrecondition);  // No step.
  Give(driver, 1);
  EXPECT_EQ(code(0, 1, {}), kPrecondition);  // No norm.
  const StepVote nan = {.clipping = {.max_norm = std::numeric_limits<double>::quiet_NaN()}};
  EXPECT_EQ(driver.stream(0).Seal(1, 1, nan).status().code(), kInvalid);
  EXPECT_FALSE(driver.job().Status().ranks[0].sealed);
  driver.SealToLook(1);
  EXPECT_EQ(code(0, 1, nan), kInvalid);
  EXPECT_EQ(code(0, 1, {.clipping = {.multipliers = {1, -1}}}), kInvalid);
  EXPECT_EQ(code(0, 2, {}), kPrecondition);
  EXPECT_EQ(code(0, {1, 1}, {}), kPrecondition);
  EXPECT_FALSE(driver.job().Status().ranks[0].voted);
  driver.VoteAll({});
  EXPECT_EQ(code(0, 1, {}), absl::StatusCode::kOk);  // Said again.
  EXPECT_EQ(code(0, 1, {.apply = false}), kPrecondition);
  EXPECT_FALSE(driver.stream(0).Discard(1).value());  // Too late.
  EXPECT_EQ(driver.job().Status().applied_steps, 1u);
  // Its rank has taken all back, and begun nothing since.
  Give(driver, 2);
  driver.Discard(0);
  driver.Discard(1);
  EXPECT_EQ(code(0, {2, 1}, {.overrides = {{0, {.lr = 0.5}}}}), kPrecondition);
}

TEST_F(JobVoteTest, WhileVotesAreAwaitedStreamsAreReopenedAndToldAgain) {
  JobDriver driver = Make(Spec("reopens"));
  JobDriver expected = Make(Spec("does-not"));
  Give(driver, 1);
  driver.SealToLook(1);
  driver.Vote(1, {});
  driver.Reopen(0);
  const RankPosition& position = driver.stream(0).position();
  EXPECT_EQ(position.open_step, 1u);
  EXPECT_EQ(position.micro_steps_ended, 1u);
  EXPECT_THAT(position.delivered, SizeIs(driver.layout().chunks_of_rank(0).size()));
  EXPECT_EQ(driver.SealWith(0, 1, std::nullopt), std::nullopt);
  driver.listener(0).WaitForNorm(1);
  driver.job().TellWaiting();
  EXPECT_THAT(driver.listener(1).waiting(), testing::ElementsAre(0));
  EXPECT_TRUE(driver.job().SecondsSinceFirstSeal().has_value());
  driver.Reopen(1);  // Its vote stays.
  EXPECT_TRUE(driver.job().Status().ranks[1].voted);
  driver.Vote(0, {});
  driver.listener(0).WaitForCommit(1);
  expected.Step(1);
  EXPECT_EQ(driver.job().StateHash(), expected.job().StateHash());
}

TEST_F(JobVoteTest, AReaderOfManyHoldsBackTheDecisionAndNotTheNorm) {
  JobDriver driver = Make(Spec("reads"));
  Give(driver, 1);
  driver.SealToLook(1);
  const absl::StatusOr<Snapshot> snapshot = driver.job().TakeSnapshot({0, 1, 2});
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->step(), 0u);
  ASSERT_TRUE(driver.job().AbortStep().ok());
  EXPECT_EQ(driver.listener(0).detached().code(), absl::StatusCode::kAborted);
  driver.AttachAll();
  driver.Step(1);
}

// Provisional updates are made with what the step began with; a vote for other things is a redo,
// bit for bit.
TEST_F(JobVoteTest, AProvisionalUpdateThatDiffersFromTheVoteIsComputedAgain) {
  const std::vector<std::pair<StepSettings, StepVote>> cases = {
      {{}, {.clipping = {.multipliers = {0.5, 1}}}},
      {{}, {.overrides = {{1, {.lr = 0.5}}}}},
      {{.expected_clipping = {.multipliers = {0.5, 1}}}, {}},
      {{}, {.clipping = {.max_norm = 1e-3}}},
  };
  int number = 0;
  for (const auto& [settings, vote] : cases) {
    const std::string name = "speculates" + std::to_string(number++);
    JobDriver speculates = Make(Spec(name, UpdateMode::kSpeculate));
    JobDriver waits = Make(Spec(name + "-waits"));
    Give(speculates, 1, settings);
    for (const int rank : {0, 1}) {
      speculates.listener(rank).WaitForProvisional(speculates.layout().chunks_of_rank(rank).size());
    }
    speculates.SealToLook(1);
    speculates.VoteAll(vote);
    Give(waits, 1, settings);
    waits.SealToLook(1);
    waits.VoteAll(vote);
    EXPECT_EQ(speculates.job().StateHash(), waits.job().StateHash());
    EXPECT_GT(speculates.job().Status().speculation.redone, 0) << name;
  }
}

TEST_F(JobVoteTest, AProvisionalUpdateWithWhatIsVotedIsPublished) {
  const StepVote vote = {.clipping = {.multipliers = {0.5, 2}}};
  JobDriver speculates = Make(Spec("right", UpdateMode::kSpeculate));
  JobDriver waits = Make(Spec("right-waits"));
  for (JobDriver* driver : {&speculates, &waits}) {
    driver->SetVote(vote);  // Which it expects, too.
    Give(*driver, 1);
    if (driver == &speculates) {
      for (const int rank : {0, 1}) {
        speculates.listener(rank).WaitForProvisional(
            speculates.layout().chunks_of_rank(rank).size());
      }
    }
    driver->SealAll(1);
  }
  EXPECT_EQ(speculates.job().StateHash(), waits.job().StateHash());
  const SpeculationCounts counts = speculates.job().Status().speculation;
  EXPECT_EQ(counts.published, static_cast<int64_t>(speculates.layout().chunks().size()));
  EXPECT_EQ(counts.redone, 0);
}

// ---------------------------------------------------------------- steps that cannot be kept

class OnAbortTest : public JobVoteTest {
 protected:
  static JobSpec Skipping(const std::string& name) {
    JobSpec spec = Spec(name, UpdateMode::kSpeculate);
    spec.on_abort = OnAbort::kSkip;
    return spec;
  }
  // The step is skipped, on these ranks, whose streams go on.
  static void ExpectSkipped(JobDriver& driver, const std::vector<int>& ranks,
                            const std::string& why) {
    const JobStatus status = driver.job().Status();
    for (const int rank : ranks) {
      driver.listener(rank).WaitForCommit(status.committed_step);
      const StepOutcome outcome = driver.listener(rank).outcomes().back();
      EXPECT_EQ(outcome.step, status.committed_step);
      EXPECT_FALSE(outcome.decision.apply);
      EXPECT_THAT(outcome.skip_reason, HasSubstr(why));
      EXPECT_TRUE(driver.listener(rank).detached().ok());
    }
    EXPECT_EQ(status.generation, Generation(1));
    EXPECT_GT(status.statistics.not_kept_steps(), 0u);
    EXPECT_EQ(status.coverage_complete_steps + status.statistics.not_kept_steps(),
              status.applied_steps + status.skipped_steps);
    EXPECT_EQ(status.recent_steps.back().outcome.skip_reason,
              driver.listener(ranks[0]).outcomes().back().skip_reason);
  }
};

TEST_F(OnAbortTest, AnAbortedStepThatAllHaveBegunIsSkippedOnAllRanksInAnyPhase) {
  JobDriver driver = Make(Skipping("skips"));
  JobDriver undisturbed = Make(Skipping("undisturbed"));
  driver.Step(1);
  undisturbed.Step(1);
  for (const bool sealed : {false, true}) {
    const std::string before = driver.job().StateHash();
    Give(driver, 5, {.overrides = {{0, {.lr = 0.25}}}, .trainer_state = "begun"});
    if (sealed) driver.SealToLook(1);
    const uint64_t step = driver.next_step();
    EXPECT_EQ(driver.job().AbortStep().value(), step);
    ExpectSkipped(driver, {0, 1}, "was aborted");
    EXPECT_EQ(driver.job().StateHash(), before);
    EXPECT_EQ(driver.job().Status().trainer_state, "begun");
    EXPECT_EQ(driver.job().Status().hyper_parameters[0].lr, 0.25);
    // What comes late is dropped, and no error.
    EXPECT_EQ(driver.stream(0).Contribute({.step = step, .chunk = 0, .empty = true}).value(),
              ContributionResult::kDiscarded);
    EXPECT_TRUE(driver.stream(1).EndMicroStep(step, 0, {}).ok());
    EXPECT_EQ(driver.stream(1).Seal(step, 1).value(), std::nullopt);
    EXPECT_TRUE(driver.stream(1).Vote(step, {}).ok());
    EXPECT_FALSE(driver.stream(1).Discard(step).value());
  }
  driver.Step(2);
  undisturbed.job().UpdateGroup(0, {.lr = 0.25}).IgnoreError();
  undisturbed.Step(2);
  EXPECT_EQ(driver.job().StateHash(), undisturbed.job().StateHash());
  EXPECT_EQ(driver.job().Status().skipped_steps, 2u);
}

TEST_F(OnAbortTest, AReplacedRankSkipsTheStepAndTheOthersGoOn) {
  JobDriver driver = Make(Skipping("replaced"));
  driver.Step(1);
  const std::string before = driver.job().StateHash();
  driver.BeginAll();
  driver.SendOf(1, 5, 0, /*final=*/true);
  driver.EndMicroStep(1, 0);
  EXPECT_EQ(driver.Seal(1, 1), std::nullopt);
  auto listener = std::make_shared<RecordingListener>();
  const absl::StatusOr<Attachment> attached =
      driver.job().Attach({.rank = 0, .process_id = "newcomer"});
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->committed_step, 2u);
  EXPECT_EQ(attached->generation, Generation(1));
  EXPECT_EQ(ReasonOf(driver.listener(0).detached()), reason::kRankReplaced);
  EXPECT_EQ(driver.stream(0).BeginStep(3, {}).code(), absl::StatusCode::kAborted);
  ExpectSkipped(driver, {1}, "has taken rank 0");
  // The process that was replaced gets nothing back.
  EXPECT_EQ(driver.job()
                .Attach({.rank = 0, .process_id = "process0", .generation = Generation(1)})
                .status()
                .code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(driver.job().StateHash(), before);
  driver.Attach(0, "newcomer", UpdateMode::kSpeculate, nullptr, Generation(1));
  driver.Step(2);
  EXPECT_EQ(driver.job().Status().committed_step, 3u);
}

TEST_F(OnAbortTest, AStepThatARankHasNotBegunIsRedone) {
  JobDriver driver = Make(Skipping("redone"));
  driver.Begin(0);
  ASSERT_TRUE(driver.job().AbortStep().ok());
  EXPECT_EQ(driver.job().Status().generation, Generation(2));
  EXPECT_EQ(driver.job().Status().committed_step, 0u);
  EXPECT_EQ(driver.listener(1).detached().code(), absl::StatusCode::kAborted);
  // Nor one of which a rank has discarded its attempt.
  driver.AttachAll();
  driver.BeginAll();
  ASSERT_TRUE(driver.Discard(0));
  ASSERT_TRUE(driver.job().AbortStep().ok());
  EXPECT_EQ(driver.job().Status().generation, Generation(3));
  driver.AttachAll();
  driver.Step(1);
}

TEST_F(OnAbortTest, AProvisionalUpdateUnderWayIsWaitedFor) {
  JobDriver driver = Make(Skipping("speculating"));
  for (uint64_t step = 1; step <= 20; ++step) {
    Give(driver, step);  // Provisional updates are queued, or run.
    ASSERT_TRUE(driver.job().AbortStep().ok());
    ExpectSkipped(driver, {0, 1}, "was aborted");
  }
  JobDriver fresh = Make(Skipping("fresh"));
  EXPECT_EQ(driver.job().StateHash(), fresh.job().StateHash());
  driver.Step(1);
  fresh.Step(1);
  EXPECT_EQ(driver.job().StateHash(), fresh.job().StateHash());
}

}  // namespace
}  // namespace ballast
