#include "client/loss_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "tests/support/messages.h"

namespace ballast::client {
namespace {

DynamicLossScaler Make(const LossScalerOptions& options) {
  return DynamicLossScaler::Create(options).value();
}

void UpdateTimes(DynamicLossScaler& scaler, int times, bool overflow) {
  for (int i = 0; i < times; ++i) scaler.Update(overflow);
}

TEST(DynamicLossScaler, StartsAtTheInitialPower) {
  EXPECT_EQ(Make({}).scale(), 65536.0f);
  EXPECT_EQ(Make({.initial_scale_power = 0}).scale(), 1.0f);
}

// The numbers of DeepSpeed's update_scale with the same options: stable_interval is 0 at the first
// step, so the doubling waits for window + 1 steps, and then for `window`.
TEST(DynamicLossScaler, DoublesAfterAWindowWithoutOverflow) {
  DynamicLossScaler scaler = Make({.initial_scale_power = 3, .window = 4});
  UpdateTimes(scaler, 4, false);
  EXPECT_EQ(scaler.scale(), 8.0f);
  scaler.Update(false);
  EXPECT_EQ(scaler.scale(), 16.0f);
  UpdateTimes(scaler, 3, false);
  EXPECT_EQ(scaler.scale(), 16.0f);
  scaler.Update(false);
  EXPECT_EQ(scaler.scale(), 32.0f);
}

TEST(DynamicLossScaler, AnOverflowBeginsTheWindowAgain) {
  DynamicLossScaler scaler = Make({.initial_scale_power = 3, .window = 4, .hysteresis = 1});
  UpdateTimes(scaler, 4, false);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 4.0f);
  UpdateTimes(scaler, 4, false);
  EXPECT_EQ(scaler.scale(), 4.0f);
  scaler.Update(false);
  EXPECT_EQ(scaler.scale(), 8.0f);
}

TEST(DynamicLossScaler, HalvesOnceTheHysteresisIsUsedUpAndThenEveryTime) {
  DynamicLossScaler scaler = Make({.initial_scale_power = 4, .hysteresis = 3});
  UpdateTimes(scaler, 2, true);
  EXPECT_EQ(scaler.scale(), 16.0f);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 8.0f);
  // Steps without overflow do not restore the allowance before the scale has doubled.
  UpdateTimes(scaler, 10, false);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 4.0f);
}

TEST(DynamicLossScaler, ADoublingGivesTheHysteresisBack) {
  DynamicLossScaler scaler = Make({.initial_scale_power = 4, .window = 2, .hysteresis = 2});
  UpdateTimes(scaler, 2, true);
  EXPECT_EQ(scaler.scale(), 8.0f);
  UpdateTimes(scaler, 3, false);
  EXPECT_EQ(scaler.scale(), 16.0f);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 16.0f);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 8.0f);
}

TEST(DynamicLossScaler, ConsecutiveHysteresisCountsOverflowsInARowOnly) {
  DynamicLossScaler scaler =
      Make({.initial_scale_power = 4, .hysteresis = 2, .consecutive_hysteresis = true});
  for (int i = 0; i < 5; ++i) {
    scaler.Update(true);
    scaler.Update(false);
  }
  EXPECT_EQ(scaler.scale(), 16.0f);
  UpdateTimes(scaler, 2, true);
  EXPECT_EQ(scaler.scale(), 8.0f);
}

TEST(DynamicLossScaler, StaysAtTheFloor) {
  DynamicLossScaler scaler = Make({.initial_scale_power = 2, .hysteresis = 1, .min_scale = 0.75f});
  UpdateTimes(scaler, 2, true);
  EXPECT_EQ(scaler.scale(), 1.0f);
  UpdateTimes(scaler, 5, true);
  EXPECT_EQ(scaler.scale(), 0.75f);
}

TEST(DynamicLossScaler, AStateBelowTheFloorIsRaisedToIt) {
  DynamicLossScaler scaler = Make({.initial_scale_power = 2, .hysteresis = 1, .min_scale = 0.5f});
  UpdateTimes(scaler, 3, true);
  ASSERT_EQ(scaler.scale(), 0.5f);
  auto restored = DynamicLossScaler::Deserialize(scaler.Serialize(),
                                                 {.initial_scale_power = 2, .min_scale = 2});
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->scale(), 2.0f);
}

TEST(DynamicLossScaler, NeverGrowsBeyondWhatFp32Multiplies) {
  DynamicLossScaler scaler = Make({.initial_scale_power = 60, .window = 1});
  UpdateTimes(scaler, 500, false);
  EXPECT_EQ(scaler.scale(), DynamicLossScaler::kMaxScale);
  EXPECT_EQ(scaler.scale(), std::ldexp(1.0f, 64));
  // An overflow halves it as at any other scale.
  UpdateTimes(scaler, 2, true);
  EXPECT_EQ(scaler.scale(), std::ldexp(1.0f, 63));
}

// As a trainer does it: the state is sent with begin_step, and after a restart the outcome of that
// step is added to it. At every point of a history the restored scaler must continue like the old
// one.
TEST(DynamicLossScaler, GoesOnWhereItsStateWasTaken) {
  const LossScalerOptions options = {
      .initial_scale_power = 5, .window = 3, .hysteresis = 2, .min_scale = 0.3f};
  const std::string history = "..x.xx....x......xxxxxxxxxxxx...x.......";
  DynamicLossScaler scaler = Make(options);
  for (size_t cut = 0; cut < history.size(); ++cut) {
    auto restored = DynamicLossScaler::Deserialize(scaler.Serialize(), options);
    ASSERT_TRUE(restored.ok()) << restored.status();
    DynamicLossScaler uninterrupted = scaler;
    for (char outcome : history.substr(cut)) {
      restored->Update(outcome == 'x');
      uninterrupted.Update(outcome == 'x');
      ASSERT_EQ(restored->scale(), uninterrupted.scale()) << "cut at " << cut;
      ASSERT_EQ(restored->Serialize(), uninterrupted.Serialize()) << "cut at " << cut;
    }
    scaler.Update(history[cut] == 'x');
  }
}

TEST(DynamicLossScaler, RestoredUnderASmallerHysteresisHasNoMoreLeftThanThat) {
  const std::string state = Make({.initial_scale_power = 4, .hysteresis = 5}).Serialize();
  auto scaler = DynamicLossScaler::Deserialize(state, {.hysteresis = 1});
  ASSERT_TRUE(scaler.ok()) << scaler.status();
  scaler->Update(true);
  EXPECT_EQ(scaler->scale(), 8.0f);
}

TEST(DynamicLossScaler, RefusesRubbishAsState) {
  const std::string good = Make({}).Serialize();
  for (const std::string& bad :
       {std::string(), std::string("rubbish"), good + " 1", good + "x", "x" + good,
        good.substr(0, good.rfind(' ')), std::string("loss_scaler.1 nan 2 0"),
        std::string("loss_scaler.1 inf 2 0"), std::string("loss_scaler.1 0 2 0"),
        std::string("loss_scaler.1 -2 2 0"), std::string("loss_scaler.1 2 0 0"),
        std::string("loss_scaler.1 2 1 -1"), std::string("loss_scaler.2 2 1 0"),
        std::string(5000, '\0')}) {
    const auto scaler = DynamicLossScaler::Deserialize(bad, {});
    EXPECT_EQ(scaler.status().code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_LT(scaler.status().message().size(), 200u);
  }
}

TEST(DynamicLossScaler, RefusesOptionsThatCannotWork) {
  const auto expect_refused = [](const LossScalerOptions& options) {
    EXPECT_TRUE(Refused(DynamicLossScaler::Create(options), absl::StatusCode::kInvalidArgument));
  };
  expect_refused({.initial_scale_power = 65});
  expect_refused({.initial_scale_power = -1});
  expect_refused({.window = 0});
  expect_refused({.hysteresis = 0});
  expect_refused({.min_scale = 0});
  expect_refused({.initial_scale_power = 2, .min_scale = 5});
  expect_refused({.min_scale = std::numeric_limits<float>::quiet_NaN()});
}

}  // namespace
}  // namespace ballast::client
