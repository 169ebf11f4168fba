// P10: a step that would leave a value in the state that is not finite is skipped, with its reason,
// before a byte moves; every other step is applied.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/histories/memory_file_system.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class JobOverflowTest : public JobDriverTest, public testing::WithParamInterface<UpdateMode> {
 protected:
  JobDriver Make(const std::function<void(JobSpec&)>& change = {}) {
    JobSpec spec = MakeJobSpec({.group_sizes = {{1000, 24}, {3000}},
                                .world_size = 2,
                                .bucket_elements = 1024,
                                .chunk_elements = 512},
                               "job" + std::to_string(++jobs_));
    spec.update_mode = GetParam();
    if (change) change(spec);
    return JobDriverTest::Make(spec);
  }
  // Gradients TestValue(4), but for one element of group 1.
  static StepOutcome StepWith(JobDriver& driver, float value, int64_t element,
                              const StepSettings& settings = {}) {
    driver.BeginAll(settings);
    for (int c = 0; c < static_cast<int>(driver.layout().chunks().size()); ++c) {
      const Chunk& chunk = driver.layout().chunks()[c];
      std::vector<float> values = driver.Values(c, 4);
      const int64_t at = element - chunk.begin;
      if (chunk.group == 1 && at >= 0 && at < chunk.elements) values[at] = value;
      EXPECT_TRUE(driver.Send(c, values, 0, /*final=*/true).ok());
    }
    driver.EndMicroStepAll(0);
    driver.SealAll(1);
    return driver.listener(0).outcomes().back();
  }
  // The step changes nothing, and the next ones are as if it had never been.
  void ExpectSkipped(JobDriver& driver, float value, const StepSettings& settings = {}) {
    const std::string before = driver.job().StateHash();
    const StepOutcome outcome = StepWith(driver, value, 2500, settings);
    EXPECT_FALSE(outcome.decision.apply);
    EXPECT_TRUE(std::isfinite(outcome.decision.norm));
    EXPECT_TRUE(Says(outcome.skip_reason));
    EXPECT_EQ(outcome.skip_cause, SkipCause::kState);
    EXPECT_EQ(driver.job().StateHash(), before);
    EXPECT_EQ(driver.job().Status().skipped_steps, 1u);
  }

 private:
  int jobs_ = 0;
};

// The least bf16 value above 3e38.
constexpr float kHuge = 0x1.c4p127f;

TEST_P(JobOverflowTest, FiniteGradientsWhoseProductWithTheMultiplierOverflows) {
  JobDriver driver = Make();
  JobDriver undisturbed = Make();
  driver.Step(3);
  undisturbed.Step(3);
  ExpectSkipped(driver, kHuge, {.scale = {.divisors = {0.5, 0.5}}});
  driver.Step(5);
  undisturbed.Step(5);
  for (int parameter = 0; parameter < 3; ++parameter) {
    for (const Plane plane : {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq}) {
      std::vector<float> got(undisturbed.layout().place(parameter).elements), want(got);
      driver.job().TakeSnapshot({parameter}).value().Read(parameter, plane, 0, absl::MakeSpan(got));
      undisturbed.job()
          .TakeSnapshot({parameter})
          .value()
          .Read(parameter, plane, 0, absl::MakeSpan(want));
      EXPECT_EQ(got, want) << parameter << " " << Name(plane);
    }
  }
}

TEST_P(JobOverflowTest, TheFirstStepOfAJobToo) {
  JobDriver driver = Make();
  ExpectSkipped(driver, kHuge, {.scale = {.divisors = {0.5, 0.5}}});
}

TEST_P(JobOverflowTest, OfTheSecondMomentAlone) {
  JobDriver driver = Make();
  driver.Step(3);
  ExpectSkipped(driver, 1e21f);
}

TEST_P(JobOverflowTest, OfTheWeightByAHugeLearningRate) {
  JobDriver driver = Make();
  driver.Step(3);
  ExpectSkipped(
      driver, 1.0f,
      {.overrides = {{1, {.lr = 3e37, .beta1 = 0.0, .beta2 = 0.9999, .bias_correction = false}}}});
}

TEST_P(JobOverflowTest, AStepThatStaysFiniteIsAppliedHoweverLargeItsGradient) {
  JobDriver driver = Make();
  driver.Step(3);
  EXPECT_TRUE(StepWith(driver, 1e20f, 2500).decision.apply);
  std::vector<float> v(3000);
  driver.job().TakeSnapshot({2}).value().Read(2, Plane::kExpAvgSq, 0, absl::MakeSpan(v));
  EXPECT_GT(v[2500], 9e36f);
  EXPECT_TRUE(std::isfinite(v[2500]));
  // Clipping makes the same huge gradient small.
  JobDriver clipping = Make();
  clipping.SetMaxNorm(1e6);
  EXPECT_TRUE(StepWith(clipping, kHuge, 2500, {.scale = {.divisors = {0.5, 0.5}}}).decision.apply);
}

// What was known of the state before says nothing of the loaded one.
TEST_P(JobOverflowTest, AfterALoadOfLargerWeights) {
  histories::MemoryFileSystem files;
  Engine engine({.memory_limit_bytes = int64_t{256} << 20, .threads = 2, .file_system = &files});
  JobSpec spec = MakeJobSpec({.group_sizes = {{1000}, {3000}}, .chunk_elements = 512}, "large");
  spec.update_mode = GetParam();
  JobDriver large(engine, spec);
  for (int chunk = 0; chunk < static_cast<int>(large.layout().chunks().size()); ++chunk) {
    std::vector<float> weights = large.Values(chunk, 1);
    for (float& weight : weights) weight = weight == 0 ? 0 : 2e38f;
    ASSERT_TRUE(large.Write(chunk, weights, std::nullopt).ok());
  }
  ASSERT_TRUE(large.job().Save("/large").ok());
  spec.name = "small";
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(3);
  ASSERT_TRUE(driver.job().Load("/large").ok());
  driver.AttachAll();
  // Decay alone: weights go to -3 times what they were.
  ExpectSkipped(driver, 1.0f, {.overrides = {{1, {.lr = 2, .weight_decay = 2}}}});
}

// torch writes NaN where both moments are zero and eps is; here such a step is a skip.
TEST_P(JobOverflowTest, ADenominatorOfZero) {
  JobDriver driver = Make([](JobSpec& spec) { spec.groups[1].hyper_parameters.eps = 0; });
  ExpectSkipped(driver, 0.0f);
  JobDriver no_zero = Make([](JobSpec& spec) { spec.groups[1].hyper_parameters.eps = 0; });
  for (const uint64_t seed : {3, 4, 5}) EXPECT_TRUE(no_zero.Step(seed).decision.apply);
}

INSTANTIATE_TEST_SUITE_P(BothModes, JobOverflowTest,
                         testing::Values(UpdateMode::kWait, UpdateMode::kSpeculate),
                         [](const auto& mode) {
                           return mode.param == UpdateMode::kWait ? "Wait" : "Speculate";
                         });

}  // namespace
}  // namespace ballast
