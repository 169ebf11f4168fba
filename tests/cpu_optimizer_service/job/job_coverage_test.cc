// Who has sent what: backwards that reached nothing, final contributions, reports of workers that
// check, and what is shown of a step in progress.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/job.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using JobCoverageTest = JobDriverTest;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const UsedParameters kNothing = {.all = false, .parameters = {}};

// ------------------------------------------------------------- backwards that reached nothing

TEST_F(JobCoverageTest, P1ABackwardThatReachedNothingIsRefusedThoughEveryChunkHasCome) {
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{1000, 24, 3000}}, .world_size = 2}));
  const std::string before = driver.job().StateHash();
  driver.BeginAll();
  for (const uint32_t m : {0u, 1u, 2u}) {
    driver.SendAll(5 + m, m);
    ASSERT_TRUE(driver.stream(0).EndMicroStep(1, m, {}).ok());
    ASSERT_TRUE(driver.stream(1).EndMicroStep(1, m, m == 0 ? UsedParameters{} : kNothing).ok());
  }
  EXPECT_FALSE(driver.stream(0).Seal(1, 3).value().has_value());
  const auto refusal = driver.stream(1).Seal(1, 3).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  ASSERT_EQ(refusal->missing.size(), 1u);
  EXPECT_EQ(refusal->missing[0].rank, 1);
  EXPECT_EQ(refusal->missing[0].micro_step, 1u);
  EXPECT_THAT(refusal->missing[0].parameters, ElementsAre("p0", "p1", "p2"));
  // It stays refused: what backward did not do cannot be sent later.
  EXPECT_TRUE(driver.stream(1).EndMicroStep(1, 1, {}).ok());
  EXPECT_TRUE(driver.stream(1).Seal(1, 3).value().has_value());
  EXPECT_EQ(driver.job().StateHash(), before);
  ASSERT_TRUE(driver.job().AbortStep().ok());
  driver.AttachAll();
  driver.Step(5, 3);  // Nothing of it is left.
  EXPECT_EQ(driver.job().Status().committed_step, 1u);
}

TEST_F(JobCoverageTest, P1OnlyTrainableParametersWithElementsCountAsReached) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{300, 0, 40}}});
  spec.layout.parameters[2].trainable = false;
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 512}};
  JobDriver driver = Make(spec);
  driver.BeginAll();
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0, {.all = false, .parameters = {1}});  // The one of no elements.
  const auto refusal = driver.stream(0).Seal(1, 1).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));

  JobSpec empty = MakeJobSpec({.group_sizes = {{0}}}, "empty");
  JobDriver nothing_to_reach = Make(empty);
  nothing_to_reach.BeginAll();
  nothing_to_reach.EndMicroStepAll(0, kNothing);
  nothing_to_reach.SealAll(1);
  EXPECT_EQ(nothing_to_reach.job().Status().committed_step, 1u);
}

TEST_F(JobCoverageTest, ABackwardThatReachedNothingIsNamedShortInALargeJob) {
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {std::vector<int64_t>(100, 8)}}));
  driver.BeginAll();
  driver.EndMicroStepAll(0, kNothing);  // Nothing was sent either: the cause is named, not that.
  const auto refusal = driver.stream(0).Seal(1, 1).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  EXPECT_EQ(refusal->missing[0].parameters.size(), kMissingNames);
}

// ------------------------------------------------------------- final contributions

TEST_F(JobCoverageTest, AfterAFinalContributionThereAreOnlyRepeats) {
  const JobSpec spec = MakeJobSpec({.group_sizes = {{512}}, .chunk_elements = 256});
  JobDriver driver = Make(spec);
  driver.BeginAll();
  ASSERT_TRUE(driver.Send(0, driver.Values(0, 1), 0, /*final=*/true).ok());
  ASSERT_TRUE(driver.Send(1, driver.Values(1, 1), 0).ok());
  EXPECT_EQ(driver.Send(0, driver.Values(0, 9), 0, /*final=*/true).value(),
            ContributionResult::kRepeat);
  EXPECT_EQ(driver.Send(0, driver.Values(0, 9), 0).value(), ContributionResult::kRepeat);
  EXPECT_TRUE(
      Refused(driver.Send(0, driver.Values(0, 9), 1), absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(driver.Send(1, driver.Values(1, 2), 1).ok());  // The other chunk is open.
  // A rank that goes on all the same is told that sending cannot help.
  driver.EndMicroStepAll(0);
  driver.EndMicroStepAll(1);
  EXPECT_TRUE(Refused(driver.stream(0).Seal(1, 2).value()->status,
                      absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  ASSERT_TRUE(driver.job().AbortStep().ok());

  driver.AttachAll();
  driver.Step(1, 2);  // An abort opens the chunks again, and so does a commit.
  driver.Step(3, 2);
  JobSpec other = spec;
  other.name = "undisturbed";
  JobDriver undisturbed = Make(other);
  undisturbed.Step(1, 2);
  undisturbed.Step(3, 2);
  EXPECT_EQ(driver.job().StateHash(), undisturbed.job().StateHash());
}

// ------------------------------------------------------------- workers that check

TEST_F(JobCoverageTest, P10ASkippedStepNamesTheWorkerThatFoundTheElementBeforeReducing) {
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{1000, 24, 3000}}, .world_size = 3}));
  const std::string before = driver.job().StateHash();
  driver.BeginAll();
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0);
  driver.SendAllWith(NAN, 0, 1005, 2, 1);
  ASSERT_TRUE(driver.stream(0).EndMicroStep(1, 1, {}).ok());
  for (const int rank : {2, 1}) {
    const UsedParameters used = {
        .non_finite = {{.parameter = 1, .element = 5 + rank, .value = -kInfinity}}};
    ASSERT_TRUE(driver.stream(rank).EndMicroStep(1, 1, used).ok());
  }
  driver.SealAll(2);
  const StepOutcome outcome = driver.listener(0).outcomes().back();
  EXPECT_FALSE(outcome.decision.apply);
  EXPECT_TRUE(Says(outcome.skip_reason));
  EXPECT_EQ(driver.job().Status().recent_steps.back().outcome.skip_reason, outcome.skip_reason);
  EXPECT_EQ(outcome.skip_cause, SkipCause::kGradient);
  EXPECT_EQ(driver.job().StateHash(), before);
  // The next step knows nothing of it.
  driver.BeginAll();
  driver.SendAllWith(NAN, 0, 1005, 2, 0);
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  EXPECT_TRUE(Says(driver.listener(0).outcomes().back().skip_reason));
}

TEST_F(JobCoverageTest, AReportAloneDoesNotSkipAStep) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{256}}});
  spec.groups[0].wire_dtype = DType::kFloat32;
  JobDriver driver = Make(spec);
  driver.SetMaxNorm(1e-3);
  const UsedParameters used = {
      .non_finite = {{.parameter = 0, .element = 255, .value = kInfinity}}};
  driver.BeginAll();
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0, used);
  driver.SealAll(1);
  EXPECT_TRUE(driver.listener(0).outcomes().back().decision.apply);
  // A skip for another reason gives that reason.
  driver.BeginAll();
  ASSERT_TRUE(driver.Send(0, std::vector<float>(256, 1e37f), 0).ok());
  driver.EndMicroStepAll(0, used);
  driver.SealAll(1);
  EXPECT_FALSE(driver.listener(0).outcomes().back().decision.apply);
  EXPECT_TRUE(Says(driver.listener(0).outcomes().back().skip_reason));
  const JobStatus status = driver.job().Status();
  EXPECT_EQ(status.statistics.skips[static_cast<size_t>(SkipCause::kMultiplier)], 1u);
  EXPECT_EQ(status.traffic.gradient_bytes_in_messages, 2 * 256 * 4);
  EXPECT_EQ(status.traffic.weight_bytes_in_messages, 256 * 2) << "a skipped step has no weights";
}

TEST_F(JobCoverageTest, ReportsThatCannotBeAreRefused) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{300, 0, 40}}});
  spec.layout.parameters[2].trainable = false;
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 512}};
  JobDriver driver = Make(spec);
  driver.BeginAll();
  const auto code = [&](const UsedParameters::NonFinite& report) {
    return driver.stream(0).EndMicroStep(1, 0, {.non_finite = report}).code();
  };
  for (const UsedParameters::NonFinite& report : std::vector<UsedParameters::NonFinite>{
           {.parameter = -1, .element = 0, .value = NAN},
           {.parameter = 3, .element = 0, .value = NAN},
           {.parameter = 2, .element = 0, .value = NAN},  // Frozen.
           {.parameter = 1, .element = 0, .value = NAN},  // Of no elements.
           {.parameter = 0, .element = -1, .value = NAN},
           {.parameter = 0, .element = 300, .value = NAN},
           {.parameter = 0, .element = 0, .value = 1.0f}}) {
    EXPECT_EQ(code(report), absl::StatusCode::kInvalidArgument)
        << report.parameter << " " << report.element;
  }
  EXPECT_EQ(driver.job().Status().ranks[0].micro_steps_ended, 0u);
  EXPECT_EQ(code({.parameter = 0, .element = 299, .value = kInfinity}), absl::StatusCode::kOk);
}

// ------------------------------------------------------------- what is shown

TEST_F(JobCoverageTest, ProgressNamesTheParametersOfChunksThatStandBehind) {
  // Rank 0: chunks 0 (p0, p1) and 1 (p2 on); rank 1: chunks 2 (p1, p2) and 3 (p2, p3, padding).
  JobSpec spec = MakeJobSpec({.group_sizes = {{100, 300, 500, 100}}, .chunk_elements = 256});
  spec.layout.world_size = 2;
  spec.layout.partitions.clear();
  for (int block = 0; block < 4; ++block) {
    spec.layout.partitions.push_back(
        {.rank = block % 2, .group = 0, .begin = 256 * block, .end = 256 * (block + 1)});
  }
  JobDriver driver = Make(spec);
  const auto rank = [&](int r) { return driver.job().Status().ranks[r]; };
  EXPECT_EQ(rank(0).furthest_micro_step, 0u);
  driver.BeginAll();
  EXPECT_THAT(rank(0).missing_parameters, IsEmpty());
  ASSERT_TRUE(driver.Send(0, driver.Values(0, 1), 0).ok());
  EXPECT_EQ(rank(0).furthest_micro_step, 1u);
  EXPECT_EQ(rank(0).chunks_complete, 1);
  EXPECT_THAT(rank(0).missing_parameters, ElementsAre("p2"));
  EXPECT_THAT(rank(1).missing_parameters, IsEmpty());  // It is not behind its own.
  ASSERT_TRUE(driver.Send(1, driver.Values(1, 1), 0).ok());
  EXPECT_EQ(rank(0).chunks_complete, 2);
  EXPECT_THAT(rank(0).missing_parameters, IsEmpty());
  ASSERT_TRUE(driver.Send(1, driver.Values(1, 1), 1).ok());
  EXPECT_EQ(rank(0).furthest_micro_step, 2u);
  EXPECT_THAT(rank(0).missing_parameters, ElementsAre("p0", "p1"));
  ASSERT_TRUE(driver.Send(2, driver.Values(2, 1), 0).ok());
  EXPECT_THAT(rank(1).missing_parameters, ElementsAre("p2", "p3"));
  ASSERT_TRUE(driver.Send(3, driver.Values(3, 1), 0).ok());
  ASSERT_TRUE(driver.Send(3, driver.Values(3, 1), 1).ok());
  EXPECT_THAT(rank(1).missing_parameters, ElementsAre("p1", "p2"));
  ASSERT_TRUE(driver.job().AbortStep().ok());
  EXPECT_EQ(rank(0).furthest_micro_step, 0u);
  EXPECT_THAT(rank(0).missing_parameters, IsEmpty());
}

TEST_F(JobCoverageTest, ProgressNamesAFewOfManyParameters) {
  // Two groups, and chunks that hold many parameters or a part of one.
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{1000}, std::vector<int64_t>(5000, 1)},
                                       .bucket_elements = 256,
                                       .chunk_elements = 256}));
  driver.BeginAll();
  const int last = static_cast<int>(driver.layout().chunks().size()) - 1;
  ASSERT_TRUE(driver.Send(last, driver.Values(last, 1), 0).ok());
  const RankProgress progress = driver.job().Status().ranks[0];
  EXPECT_EQ(progress.chunks, 4 + 20);
  EXPECT_EQ(progress.chunks_complete, 1);
  ASSERT_EQ(progress.missing_parameters.size(), kMissingNames);
  EXPECT_EQ(progress.missing_parameters[0], "p0");  // Once, though four chunks hold it.
  EXPECT_EQ(progress.missing_parameters[1], "p1");
  EXPECT_EQ(progress.missing_parameters.back(), "p15");
}

}  // namespace
}  // namespace ballast
