// Sealing without deciding, the norm, votes; steps that cannot be kept.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

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
    EXPECT_TRUE(Refused(driver.listener(rank).vote_refusals()[0],
                        absl::StatusCode::kFailedPrecondition, reason::kVoteAgain));
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
  static void ExpectSkipped(JobDriver& driver, const std::vector<int>& ranks) {
    const JobStatus status = driver.job().Status();
    for (const int rank : ranks) {
      driver.listener(rank).WaitForCommit(status.committed_step);
      const StepOutcome outcome = driver.listener(rank).outcomes().back();
      EXPECT_EQ(outcome.step, status.committed_step);
      EXPECT_FALSE(outcome.decision.apply);
      EXPECT_EQ(outcome.skip_cause, SkipCause::kNotKept);
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
  ExpectSkipped(driver, {1});
  EXPECT_TRUE(Says(driver.listener(1).outcomes().back().skip_reason));
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

TEST_F(OnAbortTest, AProvisionalUpdateUnderWayIsWaitedFor) {
  JobDriver driver = Make(Skipping("speculating"));
  for (uint64_t step = 1; step <= 20; ++step) {
    Give(driver, step);  // Provisional updates are queued, or run.
    ASSERT_TRUE(driver.job().AbortStep().ok());
    ExpectSkipped(driver, {0, 1});
  }
  EXPECT_TRUE(Says(driver.listener(0).outcomes().back().skip_reason));
  JobDriver fresh = Make(Skipping("fresh"));
  EXPECT_EQ(driver.job().StateHash(), fresh.job().StateHash());
  driver.Step(1);
  fresh.Step(1);
  EXPECT_EQ(driver.job().StateHash(), fresh.job().StateHash());
}

}  // namespace
}  // namespace ballast
