// Contributions that may_guess that they are their chunk's last, and further ones, which meet the
// provisional updates of those before.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/held_updates.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/job/outcome.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

JobSpec Spec(const std::string& name, UpdateMode mode = UpdateMode::kWait) {
  JobSpec spec = MakeJobSpec(
      {.group_sizes = {{1000, 24}, {3000}}, .world_size = 2, .chunk_elements = 512}, name);
  spec.update_mode = mode;
  return spec;
}

// The chunk's part of TestValue(seed), said to be perhaps the last one.
absl::StatusOr<ContributionResult> Give(JobDriver& driver, int chunk, uint64_t seed,
                                        uint32_t micro_step) {
  const int rank = driver.layout().chunks()[chunk].rank;
  const std::vector<std::byte> bytes = driver.Encode(chunk, driver.Values(chunk, seed));
  const absl::Span<const std::byte> piece(bytes);
  return driver.stream(rank).Contribute({.step = driver.at(rank).step,
                                         .attempt = driver.at(rank).attempt,
                                         .chunk = chunk,
                                         .micro_step_begin = micro_step,
                                         .micro_step_end = micro_step + 1,
                                         .may_guess = true,
                                         .payload = {&piece, 1}});
}

void GiveAll(JobDriver& driver, uint64_t seed, uint32_t micro_step) {
  for (int chunk = 0; chunk < static_cast<int>(driver.layout().chunks().size()); ++chunk) {
    const int rank = driver.layout().chunks()[chunk].rank;
    ASSERT_TRUE(driver.stream(rank).StopProvisional(driver.at(rank), micro_step, {chunk}).ok());
    ASSERT_TRUE(Give(driver, chunk, seed, micro_step).ok());
  }
}

using MayGuessTest = JobDriverTest;

TEST_F(MayGuessTest, IsAsGoodAsFinalWhereItIsRightAndPromisesNothing) {
  JobDriver speculates = Make(Spec("speculates", UpdateMode::kSpeculate));
  JobDriver waits = Make(Spec("waits"));
  const int64_t chunks = static_cast<int64_t>(speculates.layout().chunks().size());
  const auto await = [&] {
    for (const int rank : {0, 1}) {
      speculates.listener(rank).WaitForProvisional(speculates.layout().chunks_of_rank(rank).size());
    }
  };
  speculates.BeginAll();
  GiveAll(speculates, 1, 0);
  speculates.EndMicroStepAll(0);
  await();
  speculates.SealAll(1);
  waits.Step(1);
  EXPECT_EQ(speculates.job().StateHash(), waits.job().StateHash());
  EXPECT_EQ(speculates.job().Status().speculation.published, chunks);
  // A second micro-step, which drops the updates that were made after the first.
  speculates.BeginAll();
  GiveAll(speculates, 2, 0);
  speculates.EndMicroStepAll(0);
  await();
  GiveAll(speculates, 3, 1);
  speculates.EndMicroStepAll(1);
  speculates.SealAll(2);
  waits.Step(2, 2);
  EXPECT_EQ(speculates.job().StateHash(), waits.job().StateHash());
  EXPECT_EQ(speculates.job().Status().speculation.redone, chunks);
  for (const int rank : {0, 1}) {
    const auto shards = speculates.listener(rank).shards();
    const JobStatus status = speculates.job().Status();
    for (const int chunk : speculates.layout().chunks_of_rank(rank)) {
      ASSERT_TRUE(shards.contains(chunk));
      if (!shards.at(chunk).has_value()) continue;
      std::vector<std::byte> committed(shards.at(chunk)->size());
      ASSERT_TRUE(
          speculates.job().ReadShard(status.generation, 2, chunk, absl::MakeSpan(committed)).ok());
      EXPECT_EQ(*shards.at(chunk), committed);
    }
  }
}

TEST_F(MayGuessTest, AFurtherGradientMeetsAnUpdateAtAnyInstant) {
  JobDriver speculates = Make(Spec("races", UpdateMode::kSpeculate));
  JobDriver waits = Make(Spec("waits"));
  for (uint64_t step = 1; step <= 30; ++step) {
    speculates.BeginAll();
    for (uint32_t m = 0; m < 3; ++m) {
      GiveAll(speculates, 10 * step + m, m);  // The one before is queued, runs, is sent, or ready.
      speculates.EndMicroStepAll(m);
      if (step % 3 == m) std::this_thread::yield();
    }
    speculates.SealAll(3);
    waits.Step(10 * step, 3);
    ASSERT_EQ(speculates.job().StateHash(), waits.job().StateHash()) << "step " << step;
  }
}

// Rank 0 has given its first chunk once, whose provisional update runs until it is released. All
// calls are made from the test's own thread, so one that blocked would end the test by its time
// limit.
class RunningUpdateTest : public testing::Test {
 protected:
  explicit RunningUpdateTest(OnAbort on_abort = OnAbort::kRedo)
      : driver_(engine_, SpecWith(on_abort)) {
    driver_.UploadWeights();
    driver_.AttachAll();
    driver_.BeginAll();
    chunk_ = driver_.layout().chunks_of_rank(0)[0];
    EXPECT_TRUE(Give(driver_, chunk_, kFirst, 0).ok());
    held_.AwaitHeld(1);
  }
  ~RunningUpdateTest() override { held_.Release(); }

  static JobSpec SpecWith(OnAbort on_abort) {
    JobSpec spec = Spec("held", UpdateMode::kSpeculate);
    spec.on_abort = on_abort;
    return spec;
  }
  // Before the second contribution to the chunk.
  Pending Stop(Outcome<bool>& stopped) {
    return driver_.stream(0).StopProvisional(1, 1, {chunk_}, stopped.done());
  }
  RankProgress Progress() { return driver_.job().Status().ranks[0]; }
  // The step of two micro-steps, of which rank 0 has given a part, is that of a job that was not
  // held up.
  void ExpectTheStepToGoOn() {
    for (uint32_t m = 0; m < 2; ++m) {
      for (int chunk = 0; chunk < static_cast<int>(driver_.layout().chunks().size()); ++chunk) {
        const int rank = driver_.layout().chunks()[chunk].rank;
        ASSERT_TRUE(driver_.stream(rank).StopProvisional(1, m, {chunk}).ok());
        const auto given = Give(driver_, chunk, kFirst + m, m);
        ASSERT_EQ(given.status(), absl::OkStatus());
      }
      driver_.EndMicroStepAll(m);
    }
    driver_.SealAll(2);
    ExpectStateOfTwoMicroSteps();
  }
  void ExpectStateOfTwoMicroSteps() {
    JobDriver twin(engine_, Spec("twin"));
    twin.UploadWeights();
    twin.AttachAll();
    twin.Step(kFirst, 2);
    EXPECT_EQ(driver_.job().StateHash(), twin.job().StateHash());
  }

  static constexpr uint64_t kFirst = 70;  // The seed of its gradient.
  HeldUpdates held_;
  Engine engine_{{.memory_limit_bytes = int64_t{256} << 20, .threads = 2}};
  JobDriver driver_;
  int chunk_ = 0;
};

TEST_F(RunningUpdateTest, IsWaitedForWithoutAThreadAndThenDropped) {
  Outcome<bool> stopped;
  Stop(stopped);
  EXPECT_FALSE(stopped.ready());
  Outcome<bool> of_another_rank;
  driver_.stream(1).StopProvisional(1, 1, {driver_.layout().chunks_of_rank(1)[0]},
                                    of_another_rank.done());
  EXPECT_TRUE(of_another_rank.ready());

  held_.Release();
  EXPECT_TRUE(stopped.Get().value());
  EXPECT_EQ(driver_.job().Status().speculation.speculated, 1);
  ASSERT_TRUE(Give(driver_, chunk_, kFirst + 1, 1).ok());
  EXPECT_EQ(driver_.job().Status().speculation.redone, 1);
  ExpectTheStepToGoOn();
}

TEST_F(RunningUpdateTest, ThatIsInVainSendsNoWeights) {
  Outcome<bool> stopped;
  Stop(stopped);
  held_.Release();
  ASSERT_TRUE(stopped.Get().ok());
  ASSERT_TRUE(driver_.Discard(0)) << "which waits for what is sent";
  EXPECT_EQ(driver_.listener(0).provisional_chunks(), 0u);
}

TEST_F(RunningUpdateTest, IsNotWaitedForByAContributionThatComesWithoutTheCall) {
  EXPECT_TRUE(Refused(Give(driver_, chunk_, 1, 1), absl::StatusCode::kFailedPrecondition));
  held_.Release();
  ExpectTheStepToGoOn();
}

TEST_F(RunningUpdateTest, IsLeftAloneWhereContributeWouldAddNothing) {
  const auto chunk_count = static_cast<int64_t>(driver_.layout().chunks().size());
  const int64_t others = driver_.layout().chunks_of_rank(1)[0];
  const struct {
    StepAttempt at;
    uint32_t micro_step_begin;
    int64_t chunk;
  } calls[] = {
      {1, 0, chunk_},  // A repeat.
      {1, 2, chunk_},  // It does not follow on.
      {2, 1, chunk_}, {{1, 1}, 1, chunk_}, {1, 1, -1}, {1, 1, chunk_count}, {1, 1, others},
  };
  for (const auto& call : calls) {
    Outcome<bool> stopped;
    driver_.stream(0).StopProvisional(call.at, call.micro_step_begin, {call.chunk}, stopped.done());
    ASSERT_TRUE(stopped.ready()) << call.at.step << " " << call.chunk;
    EXPECT_TRUE(stopped.Get().ok());
  }
  held_.Release();
  driver_.listener(0).WaitForProvisional(1);
  EXPECT_EQ(driver_.job().Status().speculation.redone, 0);
  ExpectTheStepToGoOn();
}

// The engine has two threads, which begin what is queued in its order.
TEST_F(RunningUpdateTest, IsWaitedForByNoneThatIsOnlyQueuedAndThenDoesNotRun) {
  const absl::Span<const int> chunks = driver_.layout().chunks_of_rank(0);
  ASSERT_TRUE(Give(driver_, chunks[1], kFirst, 0).ok());
  held_.AwaitHeld(2);
  ASSERT_TRUE(Give(driver_, chunks[2], kFirst, 0).ok());
  Outcome<bool> stopped;
  driver_.stream(0).StopProvisional(1, 1, {chunks[2]}, stopped.done());
  ASSERT_TRUE(stopped.ready());
  ASSERT_TRUE(Give(driver_, chunks[3], kFirst, 0).ok());
  held_.Release();
  driver_.listener(0).WaitForProvisional(3);
  ASSERT_TRUE(Give(driver_, chunks[2], kFirst + 1, 1).ok());
  EXPECT_EQ(driver_.job().Status().speculation.redone, 0);
}

TEST_F(RunningUpdateTest, IsLeftToTheNextCallIfTheCallerGivesUp) {
  Outcome<bool> stopped;
  const Pending pending = Stop(stopped);
  pending.Cancel();
  ASSERT_TRUE(stopped.ready());
  EXPECT_EQ(stopped.Get().status().code(), absl::StatusCode::kCancelled);
  held_.Release();
  ExpectTheStepToGoOn();
}

TEST_F(RunningUpdateTest, IsWaitedForByTheStreamThatReplacesTheOneThatWaits) {
  Outcome<bool> older;
  Stop(older);
  driver_.Reopen(0);
  Outcome<bool> newer;
  Stop(newer);
  EXPECT_FALSE(older.ready() || newer.ready());
  held_.Release();
  EXPECT_EQ(older.Get().status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(newer.Get().ok());
  ExpectTheStepToGoOn();
}

TEST_F(RunningUpdateTest, EndsWithTheGenerationIfThatRises) {
  absl::Status detached_first;  // What the listener had been told when the Done came.
  Outcome<bool> stopped;
  driver_.stream(0).StopProvisional(
      1, 1, {chunk_}, [&, done = stopped.done()](absl::StatusOr<bool> result) mutable {
        detached_first = driver_.listener(0).detached();
        std::move(done)(std::move(result));
      });
  Outcome<uint64_t> aborted;
  driver_.job().AbortStep(aborted.done());
  EXPECT_FALSE(stopped.ready() || aborted.ready());
  held_.Release();
  EXPECT_EQ(stopped.Get().status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(detached_first), reason::kOlderGeneration);
  ASSERT_TRUE(aborted.Get().ok());
  driver_.AttachAll();
  driver_.Step(kFirst, 2);
  ExpectStateOfTwoMicroSteps();
}

class RunningUpdateOfASkippedStepTest : public RunningUpdateTest {
 protected:
  RunningUpdateOfASkippedStepTest() : RunningUpdateTest(OnAbort::kSkip) {}
};

TEST_F(RunningUpdateOfASkippedStepTest, IsFollowedByContributionsThatAreDropped) {
  Outcome<bool> stopped;
  Stop(stopped);
  Outcome<uint64_t> aborted;
  driver_.job().AbortStep(aborted.done());
  EXPECT_FALSE(stopped.ready() || aborted.ready());
  held_.Release();
  EXPECT_TRUE(stopped.Get().ok());
  ASSERT_TRUE(aborted.Get().ok());
  EXPECT_EQ(driver_.stream(0)
                .Contribute({.step = 1,
                             .chunk = chunk_,
                             .micro_step_begin = 1,
                             .micro_step_end = 2,
                             .empty = true})
                .value(),
            ContributionResult::kDiscarded);
}

}  // namespace
}  // namespace ballast
