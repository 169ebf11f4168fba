#include "cpu_optimizer_service/common/state_bounds.h"

#include <cfloat>
#include <cmath>
#include <random>
#include <vector>

#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast {
namespace {

constexpr StateBounds kFresh = {.master = 1, .exp_avg = 0, .exp_avg_sq = 0};

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
  int known = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    const auto magnitude = [&] { return std::pow(10.0, uniform(-40, 38)); };
    HyperParameters values = {.lr = std::pow(10.0, uniform(-8, 12)),
                              .beta1 = uniform(0, 1),
                              .beta2 = uniform(0, 1),
                              .eps = std::pow(10.0, uniform(-20, 2)),
                              .weight_decay = std::pow(10.0, uniform(-8, 3)),
                              .decoupled_weight_decay = trial % 2 == 0,
                              .bias_correction = trial % 3 != 0,
                              .amsgrad = trial % 5 == 0,
                              .maximize = trial % 7 == 0};
    StateBounds bounds = {.master = magnitude(), .exp_avg = magnitude(), .exp_avg_sq = magnitude()};
    std::vector<float> gradient(kBlockElements), w(kBlockElements), m(kBlockElements),
        v(kBlockElements), vm(kBlockElements);
    for (int i = 0; i < kBlockElements; ++i) {
      // At the bound, or somewhere below it.
      const auto some = [&](double bound) {
        return static_cast<float>(i % 4 == 0 ? bound * (1 - 0x1p-24) : bound * uniform(0, 1));
      };
      w[i] = some(bounds.master) * (i % 2 == 0 ? 1 : -1);
      m[i] = some(bounds.exp_avg) * (i % 3 == 0 ? 1 : -1);
      v[i] = i % 5 == 0 ? 0 : some(bounds.exp_avg_sq);
      vm[i] = some(bounds.exp_avg_sq);
    }
    const double size = magnitude();
    for (float& g : gradient) g = static_cast<float>(size * uniform(-1, 1));
    const auto multiplier = static_cast<float>(std::pow(10.0, uniform(-6, 3)));
    const double sum = BlockSumOfSquaresReference(gradient.data(), DType::kFloat32);
    bounds = BoundsAfter(bounds, values, sum, multiplier);
    if (!bounds.finite()) continue;
    ++known;
    UpdateAdamReference({.elements = kBlockElements,
                         .gradient = gradient.data(),
                         .gradient_dtype = DType::kFloat32,
                         .master = w.data(),
                         .exp_avg = m.data(),
                         .exp_avg_sq = v.data(),
                         .max_exp_avg_sq = values.amsgrad ? vm.data() : nullptr,
                         .new_master = w.data(),
                         .new_exp_avg = m.data(),
                         .new_exp_avg_sq = v.data(),
                         .new_max_exp_avg_sq = values.amsgrad ? vm.data() : nullptr,
                         .shard = nullptr,
                         .shard_dtype = DType::kFloat32,
                         .scalars = MakeAdamScalars(values, 1 + trial % 1000, multiplier)});
    for (int i = 0; i < kBlockElements; ++i) {
      ASSERT_LE(std::fabs(w[i]), bounds.master) << ToString(values);
      ASSERT_LE(std::fabs(m[i]), bounds.exp_avg) << ToString(values);
      ASSERT_LE(v[i], bounds.exp_avg_sq) << ToString(values);
      if (values.amsgrad) {
        ASSERT_LE(vm[i], bounds.exp_avg_sq) << ToString(values);
      }
    }
  }
  EXPECT_GT(known, 500);
}

}  // namespace
}  // namespace ballast
