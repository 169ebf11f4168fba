#include "cpu_optimizer_service/job/core/job_record.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "cpu_optimizer_service/job/kept/kept_job.h"

namespace ballast {
namespace {

StepRecord Record(uint64_t step, bool apply) {
  StepRecord record;
  record.outcome.step = step;
  record.outcome.decision.apply = apply;
  return record;
}

TEST(JobUid, IsNewEachTime) {
  const std::string uid = MakeJobUid();
  EXPECT_EQ(uid.size(), 32u);
  EXPECT_EQ(uid.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(uid, MakeJobUid());
}

TEST(FirstWeights, AreCompleteOnceEachChunkHasArrived) {
  FirstWeights weights(/*chunks=*/3, /*ranks=*/2);
  EXPECT_TRUE(weights.none());
  for (const int64_t chunk : {2, 0, 2}) weights.Arrive(chunk);
  EXPECT_EQ(weights.missing(), 1);
  EXPECT_FALSE(weights.none() || weights.complete());
  weights.Arrive(1);
  EXPECT_TRUE(weights.complete());
}

TEST(FirstWeights, OfARankAreForgottenWhileSomeAreMissing) {
  FirstWeights weights(/*chunks=*/3, /*ranks=*/2);
  weights.Arrive(0);
  weights.Arrive(2);
  weights.Forget(/*rank=*/1, {1, 2});
  EXPECT_EQ(weights.missing(), 2);
  EXPECT_EQ(weights.forgotten(0), 0u);
  EXPECT_EQ(weights.forgotten(1), 1u);
  weights.CompleteAll();
  weights.Forget(/*rank=*/1, {1, 2});
  EXPECT_TRUE(weights.complete());
  EXPECT_EQ(weights.forgotten(1), 1u);
}

TEST(FirstWeights, CountTheStatesThatRanksBeganWith) {
  FirstWeights weights(/*chunks=*/1, /*ranks=*/1);
  EXPECT_EQ(weights.state(), 0u);
  weights.BeginOtherState();
  weights.BeginOtherState();
  EXPECT_EQ(weights.state(), 2u);
}

TEST(StepHistory, CountsAllStepsAndRemembersTheLatest) {
  StepHistory history;
  for (uint64_t step = 1; step <= kRecentSteps + 10; ++step) {
    history.Add(Record(step, step % 5 != 0), /*coverage_complete=*/step != 3);
  }
  EXPECT_EQ(history.applied_steps + history.skipped_steps, kRecentSteps + 10);
  EXPECT_EQ(history.skipped_steps, (kRecentSteps + 10) / 5);
  EXPECT_EQ(history.coverage_complete_steps, kRecentSteps + 9);
  ASSERT_EQ(history.recent_steps.size(), kRecentSteps);
  EXPECT_EQ(history.recent_steps.front().outcome.step, 11u);
  EXPECT_EQ(history.recent_steps.back().outcome.step, kRecentSteps + 10);
}

TEST(StepHistory, CountsClippedStepsCausesOfSkipsAndPartsOfSteps) {
  StepHistory history;
  StepRecord record = Record(1, true);
  record.outcome.decision.clip_coefficient = 0.5;
  record.times = {.gathering = 0.3, .awaiting = 0.001, .deciding = 0, .updating = 1000};
  history.Add(record, true);
  record.outcome.decision.apply = false;  // A skipped step is not clipped.
  record.outcome.skip_cause = SkipCause::kState;
  history.Add(record, true);
  history.Add(Record(2, true), true);
  const StepStatistics& statistics = history.statistics;
  EXPECT_EQ(statistics.clipped_steps, 1u);
  EXPECT_EQ(statistics.skips, (std::array<uint64_t, kSkipCauses>{0, 0, 0, 1}));
  // A bound belongs to the bucket below it; what is longer than all is in the last one.
  EXPECT_EQ(statistics.awaiting.counts.front(), 3u);
  EXPECT_EQ(statistics.gathering.counts[8], 2u);  // Up to 0.5 s.
  EXPECT_EQ(statistics.updating.counts.back(), 2u);
  EXPECT_DOUBLE_EQ(statistics.updating.sum_seconds, 2000);
}

TEST(StepHistory, AddsWhatWasSpeculated) {
  StepHistory history;
  StepRecord record = Record(1, true);
  record.speculation = {.speculated = 7, .published = 4, .redone = 3};
  history.Add(record, true);
  history.Add(record, true);
  EXPECT_EQ(history.speculation.published, 8);
  EXPECT_EQ(history.speculation.redone, 6);
}

TEST(StepHistory, BoundsTheNamesOfUnusedParameters) {
  StepHistory history;
  StepRecord record = Record(1, true);
  record.outcome.unused_parameters.assign(kRecordedNames + 5, "p");
  history.Add(record, true);
  EXPECT_EQ(history.recent_steps.back().outcome.unused_parameters.size(), kRecordedNames);
}

TEST(StepHistory, OfLoadedStateKnowsItsLastStepOnly) {
  StepHistory history;
  for (uint64_t step = 1; step < 5; ++step) history.Add(Record(step, true), true);
  const StepRecord last = Record(2, true);
  history.Replace(&last);
  ASSERT_EQ(history.recent_steps.size(), 1u);
  EXPECT_EQ(history.recent_steps.back().outcome.step, 2u);
  EXPECT_EQ(history.applied_steps, 4u) << "counts since creation stay";
  history.Replace(nullptr);
  EXPECT_TRUE(history.recent_steps.empty());
}

}  // namespace
}  // namespace ballast
