#include "cpu_optimizer_service/common/rules/adam.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/floating_point_mode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::adam_test {
namespace {

constexpr float kLeastNormal = 0x1p-126f;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Element {
  float gradient = 0;
  float master = 0;
  float exp_avg = 0;
  float exp_avg_sq = 0;
  float max_exp_avg_sq = 0;
};

Element Update(Element e, const AdamScalars& scalars, bool amsgrad = false) {
  UpdateAdamReference({.elements = 1,
                       .gradient = &e.gradient,
                       .gradient_dtype = DType::kFloat32,
                       .master = &e.master,
                       .exp_avg = &e.exp_avg,
                       .exp_avg_sq = &e.exp_avg_sq,
                       .max_exp_avg_sq = amsgrad ? &e.max_exp_avg_sq : nullptr,
                       .new_master = &e.master,
                       .new_exp_avg = &e.exp_avg,
                       .new_exp_avg_sq = &e.exp_avg_sq,
                       .new_max_exp_avg_sq = amsgrad ? &e.max_exp_avg_sq : nullptr,
                       .shard = nullptr,
                       .shard_dtype = DType::kFloat32,
                       .scalars = scalars});
  return e;
}

// Every factor is one, so that a test sees the terms themselves.
AdamScalars Ones() {
  return {.weight_decay_kind = WeightDecay::kNone,
          .multiplier = 1,
          .weight_decay = 1,
          .decay = 1,
          .beta1 = 1,
          .one_minus_beta1 = 1,
          .beta2 = 1,
          .one_minus_beta2 = 1,
          .inverse_sqrt_bias_correction2 = 1,
          .eps = 1,
          .step_size = 1};
}

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

TEST(PowerBySquaring, IsExactWhereDoublesAre) {
  EXPECT_EQ(PowerBySquaring(0.5, 0), 1.0);
  EXPECT_EQ(PowerBySquaring(0.5, 1), 0.5);
  EXPECT_EQ(PowerBySquaring(0.5, 37), 0x1p-37);
  EXPECT_EQ(PowerBySquaring(0.75, 5), 0.2373046875);
  EXPECT_EQ(PowerBySquaring(0.0, 3), 0.0);
  EXPECT_EQ(PowerBySquaring(0.0, 0), 1.0);
}

TEST(PowerBySquaring, IsCloseToThePower) {
  for (const double beta : {0.9, 0.95, 0.999, 0.99999}) {
    for (const int64_t exponent : {int64_t{2}, int64_t{3}, int64_t{100}, int64_t{5000}}) {
      const double expected = std::pow(beta, static_cast<double>(exponent));
      EXPECT_NEAR(PowerBySquaring(beta, exponent) / expected, 1, 1e-11) << beta << " " << exponent;
    }
  }
}

TEST(PowerBySquaring, StaysBelowOneForTheGreatestBeta) {
  const double beta = std::nextafter(1.0, 0.0);
  for (int64_t exponent = 1; exponent < 1000; ++exponent) {
    ASSERT_LT(PowerBySquaring(beta, exponent), 1.0) << exponent;
  }
}

TEST(AdamScalars, AreTheFormulasRoundedOnce) {
  const HyperParameters values = {
      .lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1};
  const AdamScalars s = MakeAdamScalars(values, 3, 0.25f);
  EXPECT_EQ(s.weight_decay_kind, WeightDecay::kDecoupled);
  EXPECT_EQ(s.multiplier, 0.25f);
  EXPECT_EQ(s.weight_decay, 0.1f);
  EXPECT_EQ(s.decay, static_cast<float>(1 - 3e-4 * 0.1));
  EXPECT_EQ(s.beta1, 0.9f);
  EXPECT_EQ(s.one_minus_beta1, static_cast<float>(1 - 0.9));
  EXPECT_EQ(s.beta2, 0.95f);
  EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1 - 0.95));
  EXPECT_EQ(s.inverse_sqrt_bias_correction2,
            static_cast<float>(1 / std::sqrt(1 - PowerBySquaring(0.95, 3))));
  EXPECT_EQ(s.eps, 1e-6f);
  EXPECT_EQ(s.step_size, static_cast<float>(3e-4 / (1 - PowerBySquaring(0.9, 3))));
}

TEST(AdamScalars, LeaveOutBiasCorrectionWhenToldTo) {
  const AdamScalars s = MakeAdamScalars({.lr = 0.5, .bias_correction = false}, 1, 1);
  EXPECT_EQ(s.inverse_sqrt_bias_correction2, 1.0f);
  EXPECT_EQ(s.step_size, 0.5f);
}

TEST(AdamScalars, TurnTheGradientRoundToMaximize) {
  EXPECT_EQ(MakeAdamScalars({.maximize = true}, 1, 0.5f).multiplier, -0.5f);
}

TEST(AdamScalars, NameTheKindOfWeightDecay) {
  const auto kind = [](double weight_decay, bool decoupled) {
    return MakeAdamScalars({.weight_decay = weight_decay, .decoupled_weight_decay = decoupled}, 1,
                           1)
        .weight_decay_kind;
  };
  EXPECT_EQ(kind(0.1, true), WeightDecay::kDecoupled);
  EXPECT_EQ(kind(0.1, false), WeightDecay::kL2);
  EXPECT_EQ(kind(0, true), WeightDecay::kNone);
  EXPECT_EQ(kind(0, false), WeightDecay::kNone);
}

TEST(AdamScalars, AreZeroWhereFp32WouldBeDenormal) {
  // The second would round up to 2^-126 if it were rounded before it is compared.
  for (const double denormal : {1e-40, std::nextafter(0x1p-126, 0.0)}) {
    EXPECT_EQ(Bits(MakeAdamScalars({.eps = denormal}, 1, 1).eps), 0u);
    EXPECT_EQ(MakeAdamScalars({.lr = denormal, .bias_correction = false}, 1, 1).step_size, 0.0f);
  }
  EXPECT_EQ(MakeAdamScalars({.eps = 0x1p-126}, 1, 1).eps, kLeastNormal);
  EXPECT_EQ(MakeAdamScalars({}, 1, 1e-40f).multiplier, 0.0f);
}

TEST(AdamReference, MovesAWeightByLrInTheFirstStep) {
  const HyperParameters values = {.lr = 0.125, .eps = 0, .weight_decay = 0};
  const Element e = Update({.gradient = 3, .master = 1}, MakeAdamScalars(values, 1, 1));
  EXPECT_FLOAT_EQ(e.exp_avg, 0.3f);
  EXPECT_FLOAT_EQ(e.exp_avg_sq, 0.009f);
  EXPECT_FLOAT_EQ(e.master, 0.875f);
}

TEST(AdamReference, KeepsTheGreatestSecondMomentWithAmsgrad) {
  const Element start = {.gradient = 2, .exp_avg_sq = 1, .max_exp_avg_sq = 16};
  Element e = Update(start, Ones(), /*amsgrad=*/true);
  EXPECT_EQ(e.exp_avg_sq, 5.0f);
  EXPECT_EQ(e.max_exp_avg_sq, 16.0f);
  EXPECT_EQ(e.master, -2.0f / (4 + 1));
  e = Update({.gradient = 4, .max_exp_avg_sq = 15}, Ones(), /*amsgrad=*/true);
  EXPECT_EQ(e.max_exp_avg_sq, 16.0f);
  EXPECT_TRUE(
      std::isnan(Update({.gradient = 1, .max_exp_avg_sq = kNan}, Ones(), true).max_exp_avg_sq));
  EXPECT_TRUE(
      std::isnan(Update({.gradient = kNan, .max_exp_avg_sq = 1}, Ones(), true).max_exp_avg_sq));
}

TEST(AdamReference, CountsAProductOfTheLeastNormalAsZero) {
  const float above = std::nextafter(kLeastNormal, 1.0f);
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT_EQ(Bits(Update({.exp_avg = sign * kLeastNormal}, Ones()).exp_avg), 0u);
    EXPECT_EQ(Update({.exp_avg = sign * above}, Ones()).exp_avg, sign * above);
    EXPECT_EQ(Bits(Update({.gradient = sign * kLeastNormal}, Ones()).exp_avg), 0u);
    EXPECT_EQ(Update({.gradient = sign * above}, Ones()).exp_avg, sign * above);
  }
  // Rounds to 2^-126 from below.
  AdamScalars s = Ones();
  s.beta1 = 0x1.000002p-63f;
  EXPECT_EQ(Bits(Update({.exp_avg = 0x1.fffffcp-64f}, s).exp_avg), 0u);
}

TEST(AdamReference, KeepsASumOfTheLeastNormal) {
  const Element at = {.gradient = -2 * kLeastNormal, .exp_avg = 3 * kLeastNormal};
  EXPECT_EQ(Update(at, Ones()).exp_avg, kLeastNormal);
  const Element below = {.gradient = -1.5f * kLeastNormal, .exp_avg = 2 * kLeastNormal};
  EXPECT_EQ(Bits(Update(below, Ones()).exp_avg), 0u);
  // The weight is a sum too.
  AdamScalars s = Ones();
  s.beta1 = s.one_minus_beta1 = 0;
  EXPECT_EQ(Update({.master = kLeastNormal}, s).master, kLeastNormal);
  EXPECT_EQ(Bits(Update({.master = 0.5f * kLeastNormal}, s).master), 0u);
  EXPECT_EQ(Bits(Update({.master = -0.0f}, s).master), 0u);
}

TEST(AdamReference, CountsAQuotientOfTheLeastNormalAsZero) {
  AdamScalars s = Ones();
  s.one_minus_beta1 = s.one_minus_beta2 = 0;
  s.eps = 4;
  s.step_size = 2;
  EXPECT_EQ(Bits(Update({.exp_avg = 4 * kLeastNormal}, s).master), 0u);
  const float above = std::nextafter(kLeastNormal, 1.0f);
  EXPECT_EQ(Update({.exp_avg = 4 * above}, s).master, -2 * above);
}

TEST(AdamReference, ReadsADenormalAsZeroEvenWhereAFactorWouldMakeItNormal) {
  AdamScalars s = Ones();
  s.multiplier = 0x1p60f;
  EXPECT_EQ(Bits(Update({.gradient = 0.5f * kLeastNormal}, s).exp_avg), 0u);
  EXPECT_EQ(Update({.gradient = kLeastNormal}, s).exp_avg, 0x1p-66f);
}

TEST(AdamReference, LetsNanAndInfinityThrough) {
  EXPECT_TRUE(std::isnan(Update({.gradient = kNan}, Ones()).exp_avg));
  EXPECT_TRUE(std::isnan(Update({.gradient = kNan}, Ones()).master));
  EXPECT_EQ(Update({.gradient = -kInfinity}, Ones()).exp_avg, -kInfinity);
  EXPECT_TRUE(std::isnan(Update({.gradient = 1, .exp_avg = kNan}, Ones()).master));
}

// --- Flushing modes ---

std::vector<float> BoundaryValues() {
  std::vector<float> values = {
      0.0f,   1.0f,  0x1p-149f, 0x1.8p-127f, 0x1p-63f, 0x1.000002p-63f, 0x1.fffffcp-64f,
      1e-20f, 1e20f, 3.4e38f,   kInfinity};
  for (const float base : {kLeastNormal, 2 * kLeastNormal, 0x1p-125f, 0x1p-124f}) {
    values.push_back(std::nextafter(base, 0.0f));
    values.push_back(base);
    values.push_back(std::nextafter(base, 1.0f));
    values.push_back(1.5f * base);
  }
  const size_t positive = values.size();
  for (size_t i = 0; i < positive; ++i) values.push_back(-values[i]);
  values.push_back(kNan);
  return values;
}

// Values near the boundary in every plane, and factors that carry products across it.
std::vector<uint32_t> UpdateManyElements() {
  const std::vector<float> values = BoundaryValues();
  std::mt19937 random(1);
  const auto pick = [&] { return values[random() % values.size()]; };
  const std::vector<float> factors = {0.9f, 0.1f, 0.5f, 1.0f, 0.999f, 0.001f, 0x1.fffffep-1f};
  const auto factor = [&] { return factors[random() % factors.size()]; };
  std::vector<uint32_t> results;
  for (int i = 0; i < 20000; ++i) {
    AdamScalars s = Ones();
    s.weight_decay_kind = static_cast<WeightDecay>(i % 3);
    s.multiplier = i % 2 == 0 ? factor() : 4.0f;
    s.weight_decay = factor();
    s.decay = factor();
    s.beta1 = factor();
    s.one_minus_beta1 = factor();
    s.beta2 = factor();
    s.one_minus_beta2 = factor();
    s.eps = std::array{0.0f, 1e-8f, 1.0f}[random() % 3];
    s.step_size = i % 7 == 0 ? 8.0f : factor();
    const Element start = {pick(), pick(), pick(), std::fabs(pick()), std::fabs(pick())};
    const Element e = Update(start, s, i % 4 < 2);
    for (const float x : {e.master, e.exp_avg, e.exp_avg_sq, e.max_exp_avg_sq}) {
      results.push_back(std::isnan(x) ? Bits(kNan) : Bits(x));
    }
  }
  return results;
}

TEST(AdamReference, GivesTheSameBitsWithDenormalsKeptAndFlushed) {
  std::vector<uint32_t> kept;
  std::vector<uint32_t> flushed;
  {
    const ScopedFloatingPointMode mode(Denormals::kKeep);
    kept = UpdateManyElements();
  }
  {
    const ScopedFloatingPointMode mode(Denormals::kFlush);
    flushed = UpdateManyElements();
  }
  EXPECT_EQ(kept, flushed);
}

#if defined(__x86_64__)
TEST(AdamReference, GivesTheSameBitsWithEitherHalfOfFlushing) {
  std::vector<uint32_t> kept;
  {
    const ScopedFloatingPointMode mode(Denormals::kKeep);
    kept = UpdateManyElements();
  }
  for (const unsigned half : {0x8000u, 0x0040u}) {  // FTZ, DAZ
    const ScopedFloatingPointMode restore_afterwards(Denormals::kKeep);
    _mm_setcsr(0x1f80u | half);
    EXPECT_EQ(UpdateManyElements(), kept) << half;
  }
}
#endif

TEST(FloatingPointMode, FlushesAndRestores) {
  volatile float least = kLeastNormal;
  const auto halved_is_zero = [&least] {
    volatile float half = least * 0.5f;
    return Bits(half) == 0;
  };
  const bool before = halved_is_zero();
  {
    const ScopedFloatingPointMode flush(Denormals::kFlush);
    EXPECT_TRUE(halved_is_zero());
    {
      const ScopedFloatingPointMode keep(Denormals::kKeep);
      EXPECT_FALSE(halved_is_zero());
    }
    EXPECT_TRUE(halved_is_zero());
  }
  EXPECT_EQ(halved_is_zero(), before);
}

}  // namespace
}  // namespace ballast::adam_test
