#include "gpu_worker/training/learning_rate.h"

#include <gtest/gtest.h>

namespace ballast::worker {
namespace {

TEST(LearningRate, RisesToThePeakAndFallsToItsFraction) {
  const LearningRateSchedule schedule{
      .peak = 0.5, .warmup_steps = 10, .decay_end = 110, .final_fraction = 0.1};
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 1), 0.05);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 10), 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 60), 0.5 * 0.55);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 110), 0.05);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 1000), 0.05);
}

TEST(LearningRate, NeedsNoWarmupAndNoDecay) {
  EXPECT_DOUBLE_EQ(LearningRate({.peak = 1, .warmup_steps = 0, .decay_end = 4}, 4), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate({.peak = 1, .warmup_steps = 10, .decay_end = 4}, 4), 0.4);
}

}  // namespace
}  // namespace ballast::worker
