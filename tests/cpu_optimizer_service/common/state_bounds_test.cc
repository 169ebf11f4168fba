#include "cpu_optimizer_service/common/state_bounds.h"

#include <array>
#include <cfloat>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/rule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast {
namespace {

constexpr StateBounds kFresh = {.planes = {1, 0, 0, 0}};

TEST(StateBounds, NothingIsKnownAtFirst) {
  EXPECT_FALSE(StateBounds().finite());
  EXPECT_FALSE(BoundsAfter({}, {}, 1, 1).finite());
}

TEST(StateBounds, OrdinaryTrainingIsKnownToStayFinite) {
  for (const double eps : {1e-8, 1e-15}) {
    for (const bool decoupled : {true, false}) {
      StateBounds bounds = kFresh;
      for (int step = 0; step < 1'000'000; ++step) {
        // A norm of a thousand, before the loss scale is divided away.
        const HyperParameters values = {
            .lr = 1e-3, .eps = eps, .weight_decay = 0.1, .decoupled_weight_decay = decoupled};
        bounds = BoundsAfter(bounds, values, 1e6 * 65536.0 * 65536.0, 1 / 65536.0f);
        if (!decoupled && !bounds.finite()) bounds = kFresh;  // As after a look at the elements.
      }
      EXPECT_TRUE(bounds.finite()) << eps << decoupled;
    }
  }
}

TEST(StateBounds, ThereIsNoneWithoutAnEpsilonOrWhereSomethingMayOverflow) {
  EXPECT_TRUE(BoundsAfter(kFresh, {}, 1, 1).finite());
  EXPECT_FALSE(BoundsAfter(kFresh, {.eps = 0}, 1, 1).finite());
  EXPECT_FALSE(BoundsAfter(kFresh, {.eps = 1e-40}, 1, 1).finite());
  EXPECT_FALSE(BoundsAfter(kFresh, {.lr = 1e35}, 1, 1).finite());
  EXPECT_FALSE(BoundsAfter(kFresh, {}, 9e76, 2).finite());
  EXPECT_FALSE(BoundsAfter(kFresh, {}, std::nan(""), 1).finite());
}

// Elements of every magnitude, updated in many ways: none is ever above its bound, and where there
// is a bound, all are finite.
TEST(StateBounds, HoldForEveryElement) {
  std::mt19937_64 random(7);
  const auto uniform = [&](double from, double to) {
    return std::uniform_real_distribution<double>(from, to)(random);
  };
  std::map<Rule, int> known;
  for (int trial = 0; trial < 8000; ++trial) {
    const auto magnitude = [&] { return std::pow(10.0, uniform(-40, 38)); };
    // Every second trial is of Adam, whose hyper-parameters are the most.
    const auto rule = static_cast<Rule>(trial % 2 == 0 ? 0 : trial / 2 % Rules().size());
    HyperParameters values = DefaultsOf(rule);
    values.lr = std::pow(10.0, uniform(-8, 12));
    values.beta1 = uniform(0, 1);
    values.beta2 = uniform(0, 1);
    values.eps = std::pow(10.0, uniform(-20, 2));
    values.weight_decay = std::pow(10.0, uniform(-8, 3));
    values.decoupled_weight_decay = trial % 4 < 2;
    values.bias_correction = trial % 3 != 0;
    values.amsgrad = trial % 5 == 0;
    values.maximize = trial % 7 == 0;
    values.momentum = trial % 3 == 0 ? 0 : uniform(0, 1.5);
    values.nesterov = values.momentum > 0 && trial % 5 == 0;
    values.dampening = values.nesterov ? 0 : uniform(-1, 3);
    values.lr_decay = trial % 3 == 0 ? 0 : uniform(0, 1);
    if (!Validate(values).ok()) continue;
    const PlaneList planes = PlanesOf(values);
    StateBounds bounds = {.planes = {}};
    for (size_t place = 0; place < planes.size(); ++place) bounds.planes[place] = magnitude();
    std::vector<float> gradient(kBlockElements);
    std::array<std::vector<float>, kMaxPlanes> state;
    state.fill(gradient);
    for (int i = 0; i < kBlockElements; ++i) {
      for (size_t place = 0; place < planes.size(); ++place) {
        // At the bound, or somewhere below it.
        const double below = i % 4 == 0 ? 1 - 0x1p-24 : uniform(0, 1);
        float& value = state[place][i];
        value = static_cast<float>(bounds.planes[place] * below);
        if (IsOfSquares(planes[place])) {
          if (i % 5 == 0) value = 0;
        } else if ((i + place) % 2 == 0) {
          value = -value;
        }
      }
    }
    const double size = magnitude();
    for (float& g : gradient) g = static_cast<float>(size * uniform(-1, 1));
    const auto multiplier = static_cast<float>(std::pow(10.0, uniform(-6, 3)));
    const double sum = BlockSumOfSquaresReference(gradient.data(), DType::kFloat32);
    bounds = BoundsAfter(bounds, values, sum, multiplier);
    if (!bounds.finite()) continue;
    ++known[rule];
    RuleRun run = {.elements = kBlockElements,
                   .gradient = gradient.data(),
                   .values = &values,
                   .update_count = trial % 11 == 0 ? 1 : 1 + trial % 1000,
                   .multiplier = multiplier};
    for (size_t place = 0; place < planes.size(); ++place) {
      run.from[place] = run.to[place] = state[place].data();
    }
    UpdateReference(run);
    for (size_t place = 0; place < planes.size(); ++place) {
      // The first of two rounds does not write it.
      if (place == 0 && RowOf(rule).rounds > 1) continue;
      for (const float value : state[place]) {
        ASSERT_LE(std::fabs(value), bounds.planes[place])
            << Name(planes[place]) << " of " << ToString(values);
      }
    }
  }
  EXPECT_EQ(known.size(), Rules().size());
  for (const auto& [rule, count] : known) EXPECT_GT(count, 100) << RowOf(rule).name;
}

TEST(StateBounds, OfRulesThatMoveByLrRiseByLr) {
  for (const Rule rule : {Rule::kLion, Rule::kSignSgd}) {
    StateBounds bounds = {.planes = {1, 0, 0, 0}};
    for (int step = 0; step < 1000; ++step) {
      bounds = BoundsAfter(bounds, DefaultsOf(rule), 1e6, 1);
    }
    EXPECT_LT(bounds.planes[0], 1 + 1000 * DefaultsOf(rule).lr * 1.02) << RowOf(rule).name;
  }
}

}  // namespace
}  // namespace ballast
