// Training with fp16 gradients and weights: dynamic loss scaling, skipped steps, the scaler's
// state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/gpu_worker/training/meddling_optimizer.h"
#include "tests/gpu_worker/training/training.h"

namespace ballast::worker {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// So large a first scale that gradients overflow fp16 at first, whatever the rank.
Training OverflowingTraining() {
  return {.world_size = 2,
          .wire_dtype = DType::kFloat16,
          .weights_dtype = DType::kFloat16,
          .steps = 18,
          .loss_scaler =
              client::LossScalerOptions{.initial_scale_power = 16, .window = 3, .hysteresis = 1}};
}

int SkippedSteps(const Result& result) {
  return std::count_if(result.reports.begin(), result.reports.end(),
                       [](const StepReport& report) { return !report.applied; });
}

TEST(Fp16Training, OverflowSkipsStepsAndHalvesTheScaleUntilItFits) {
  Service service;
  std::vector<std::string> hashes;
  const Result result = Train(OverflowingTraining(), service.Optimizer(), [&](const StepReport&) {
    hashes.push_back(service.job()->StateHash());
  });
  const std::vector<StepReport>& reports = result.reports;
  ASSERT_EQ(reports.size(), 18);
  size_t first_applied = 0;
  while (first_applied < reports.size() && !reports[first_applied].applied) ++first_applied;
  ASSERT_GE(first_applied, 2);
  ASSERT_LE(first_applied, 12);
  for (size_t i = 0; i <= first_applied; ++i) {
    EXPECT_EQ(reports[i].loss_scale, std::ldexp(1.0, 16 - static_cast<int>(i)));
    // The weights have not moved: neither has the state. Losses differ by their batches only.
    if (i < first_applied) EXPECT_EQ(hashes[i], hashes[0]);
  }
  EXPECT_NE(hashes[first_applied], hashes[0]);
  EXPECT_LT(reports.back().loss, 0.97 * reports.front().loss);
}

TEST(Fp16Training, EqualsTheLocalOptimizerBitForBit) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    Training training = OverflowingTraining();
    training.accumulation = accumulation;
    Service service;
    const Result local = Train(training, MakeLocalOptimizer);
    ExpectSame(Train(training, service.Optimizer()), local);
    EXPECT_GE(SkippedSteps(local), 2);
  }
}

TEST(Fp16Training, ARestartedWorkerFindsTheScaleAgain) {
  Service whole, service;
  const Result expected = Train(OverflowingTraining(), whole.Optimizer());
  std::vector<StepReport> reports;
  Result last;
  for (const uint64_t steps : {1, 4, 11, 18}) {  // After skipped steps and after applied ones.
    Training training = OverflowingTraining();
    training.steps = steps;
    last = Train(training, service.Optimizer());
    reports.insert(reports.end(), last.reports.begin(), last.reports.end());
  }
  last.reports = reports;
  // The learning rate is a function of the step alone.
  ExpectSame(last, expected);
}

TEST(Fp16Training, AnAbortedStepIsDoneAgainWithItsScale) {
  Service whole, service;
  const Result expected = Train(OverflowingTraining(), whole.Optimizer());
  std::mutex mutex;
  std::set<uint64_t> aborted;
  const Result result =
      Train(OverflowingTraining(), Meddling(service.Optimizer(), [&](const Instant& instant) {
              const std::lock_guard lock(mutex);
              if (instant.verb == Verb::kSeal && instant.when == When::kBefore &&
                  instant.rank == 1 && aborted.insert(instant.step).second) {
                EXPECT_TRUE(service.job()->AbortStep().ok());
              }
              return absl::OkStatus();
            }));
  ExpectSame(result, expected);
  EXPECT_EQ(aborted.size(), 18);
}

TEST(Fp16Training, CheckedGradientsNameTheWorkerInTheSkipReason) {
  Training training = OverflowingTraining();
  training.steps = 1;
  training.check_gradients = true;
  Service service;
  const Result result = Train(training, service.Optimizer());
  ASSERT_FALSE(result.reports[0].applied);
  EXPECT_THAT(result.reports[0].skip_reason, AllOf(HasSubstr("rank"), HasSubstr("inf")));
}

TEST(Fp16Training, NumbersOfAllFormatsTrainAlike) {
  std::vector<double> losses;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    Training training{.world_size = 2, .wire_dtype = dtype, .weights_dtype = dtype, .steps = 10};
    if (dtype == DType::kFloat16) training.loss_scaler = {.initial_scale_power = 8};
    Service service;
    const Result result = Train(training, service.Optimizer());
    EXPECT_EQ(SkippedSteps(result), 0);
    losses.push_back(result.reports.back().loss);
    ExpectSame(result, Train(training, MakeLocalOptimizer));
  }
  EXPECT_NEAR(losses[0], losses[2], 0.02);  // bf16 weights round to 2^-9.
  EXPECT_NEAR(losses[1], losses[2], 0.002);
}

}  // namespace
}  // namespace ballast::worker
