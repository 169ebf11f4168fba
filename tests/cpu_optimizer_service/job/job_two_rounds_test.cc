// A rule of two rounds (Muon) beside one of one round, in a job. Histories play its deaths.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/muon.h"
#include "cpu_optimizer_service/job/update/second_round.h"
#include "tests/cpu_optimizer_service/job/muon_job_test.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class JobTwoRoundsTest : public MuonJobTest {
 protected:
  static JobSpec Spec(bool keep_previous = false) {
    JobSpec spec = MatricesSpec(/*bucket_elements=*/1024);
    spec.keep_previous = keep_previous;
    return spec;
  }
  static std::string LastLeft(JobDriver& driver) {
    return driver.job().Status().recent_steps.back().outcome.left;
  }
};

TEST_F(JobTwoRoundsTest, AMatrixWhoseStepIsNotFiniteKeepsItsWeightsAndOthersGoOn) {
  JobDriver driver = Make(Spec());
  driver.Step(3);
  EXPECT_EQ(LastLeft(driver), "");
  const std::vector<float> weights = Read(driver, 0, Plane::kMaster);
  const std::vector<float> momentum = Read(driver, 0, Plane::kMomentumBuffer);
  const std::vector<float> others = Read(driver, 2, Plane::kMaster);
  // By values that are not finite, and by a step that is too large.
  for (const HyperParameterOverrides& changes :
       {HyperParameterOverrides{.ns_a = 1e30, .ns_b = 1e30, .ns_c = 1e30},
        HyperParameterOverrides{.lr = 3e38}}) {
    driver.Step(4, 1, {.overrides = {{0, changes}}});
    EXPECT_TRUE(Says(LastLeft(driver)));
    EXPECT_EQ(driver.listener(1).left(), LastLeft(driver));
    EXPECT_EQ(Read(driver, 0, Plane::kMaster), weights);
    EXPECT_NE(Read(driver, 0, Plane::kMomentumBuffer), momentum);
    EXPECT_NE(Read(driver, 2, Plane::kMaster), others);
    ASSERT_TRUE(driver.job().UpdateGroup(0, {.lr = 1e-3, .ns_a = 3, .ns_b = -3, .ns_c = 1}).ok());
  }
  driver.Step(5);
  EXPECT_EQ(LastLeft(driver), "");
  EXPECT_EQ(driver.listener(1).left(), "");
  EXPECT_NE(Read(driver, 0, Plane::kMaster), weights);
  EXPECT_EQ(driver.job().Status().applied_steps, 4u);
}

TEST_F(JobTwoRoundsTest, AStepIsSkippedOrUndoneWithBothRounds) {
  JobDriver driver = Make(Spec(/*keep_previous=*/true));
  driver.Step(3);
  const std::string before = driver.job().StateHash();
  driver.BeginAll({.scale = {.loss_scale = 1e-38}});  // With that no multiplier is finite.
  for (int c = 0; c < static_cast<int>(driver.layout().chunks().size()); ++c) {
    EXPECT_TRUE(driver.Send(c, driver.Values(c, 4), 0, /*final=*/true).ok());
  }
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  EXPECT_FALSE(driver.listener(0).outcomes().back().decision.apply);
  EXPECT_EQ(driver.job().StateHash(), before);
  driver.Step(4);
  EXPECT_NE(driver.job().StateHash(), before);
  EXPECT_EQ(driver.job().UndoStep().value(), 3u);
  EXPECT_EQ(driver.job().StateHash(), before);
}

TEST(WeightBoundAfter, HoldsForEveryElementOrIsUnknown) {
  std::mt19937_64 random(1);
  const auto magnitude = [&](double from, double to) {
    return std::pow(10.0, std::uniform_real_distribution<double>(from, to)(random));
  };
  int known = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    HyperParameters values = DefaultsOf(Rule::kMuon);
    values.lr = magnitude(-8, 38);
    values.weight_decay = trial % 3 == 0 ? 0 : magnitude(-8, 20);
    values.match_rms_adamw = trial % 2 == 0;
    if (!Validate(values).ok()) continue;
    const std::vector<int64_t> shape = {1 + trial % 4096, 8};
    const auto largest = static_cast<float>(magnitude(-40, 38));
    std::vector<float> weights = {0, largest, -largest, largest / 3};
    std::vector<float> orthogonal = weights;
    for (float& o : orthogonal) o *= static_cast<float>(magnitude(-40, 0));
    std::ranges::shuffle(orthogonal, random);
    double of_orthogonal = 0;
    for (const float o : orthogonal) of_orthogonal = std::max<double>(of_orthogonal, std::fabs(o));
    const double bound = WeightBoundAfter(values, shape, largest, of_orthogonal);
    if (!std::isfinite(bound)) continue;
    ++known;
    RuleRun run = {.elements = 4,
                   .gradient = orthogonal.data(),
                   .gradient_dtype = DType::kFloat32,
                   .values = &values,
                   .multiplier = static_cast<float>(AdjustmentOf(values, shape[0], shape[1])),
                   .round = Round::kSecond};
    run.from[0] = run.to[0] = weights.data();
    UpdateReference(run);
    for (const float weight : weights) {
      ASSERT_LE(std::fabs(weight), bound * (1 + 0x1p-20)) << ToString(values);
    }
  }
  EXPECT_GT(known, 1000);
}

}  // namespace
}  // namespace ballast
