#include "cpu_optimizer_service/common/gradient_norm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "absl/base/attributes.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/floating_point_mode.h"

namespace ballast {
namespace {

constexpr int64_t kLanes = 16;

// Not inlined, so that all of it runs in the mode that its caller set.
ABSL_ATTRIBUTE_NOINLINE double SumOfSquares(const void* gradient, DType dtype, int64_t elements) {
  std::array<double, kLanes> lanes = {};
  for (int64_t i = 0; i < elements; ++i) {
    const double value = LoadElement(gradient, dtype, i);
    // In the order that the header gives, which the vector kernels follow bit for bit.
    lanes[i % kLanes] += value * value;
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

double DivisorOf(const GradientScale& scale, size_t group) {
  return scale.loss_scale * (scale.divisors.empty() ? 1.0 : scale.divisors[group]);
}

// Not inlined, as above.
ABSL_ATTRIBUTE_NOINLINE double SquaredNorm(double group_sum, const GradientScale& scale,
                                           size_t group) {
  const double unscale = 1 / DivisorOf(scale, group);
  // In this order, which the header gives: another one may round otherwise.
  return unscale * unscale * group_sum;
}

float Multiplier(double clip_coefficient, const GradientScale& scale, size_t group) {
  // One division and one rounding to fp32: proto/README.md promises these bits to other clients.
  return static_cast<float>(clip_coefficient / DivisorOf(scale, group));
}

double MultiplierOf(const Clipping& clipping, size_t group) {
  return clipping.multipliers.empty() ? 1.0 : clipping.multipliers[group];
}

}  // namespace

absl::Status Validate(const Clipping& clipping, int group_count) {
  if (!std::isfinite(clipping.max_norm) || clipping.max_norm < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_norm is ", clipping.max_norm,
                     "; expected a finite value, 0 or more (0: no clipping)"));
  }
  if (clipping.multipliers.empty()) return absl::OkStatus();
  if (clipping.max_norm > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_norm ", clipping.max_norm, " and multipliers are both given; give only one"));
  }
  if (static_cast<int>(clipping.multipliers.size()) != group_count) {
    return absl::InvalidArgumentError(absl::StrCat("got ", clipping.multipliers.size(),
                                                   " multipliers for ", group_count, " groups"));
  }
  for (size_t group = 0; group < clipping.multipliers.size(); ++group) {
    const double multiplier = clipping.multipliers[group];
    if (std::isfinite(multiplier) && multiplier > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the multiplier of group ", group, " is ", multiplier,
                     "; expected a finite, positive value; to skip the step, vote to abandon it"));
  }
  return absl::OkStatus();
}

std::string FirstDifference(const Clipping& a, const Clipping& b) {
  if (a.max_norm != b.max_norm) {
    return absl::StrCat("max_norm ", b.max_norm, " where others have ", a.max_norm);
  }
  if (a.multipliers.size() != b.multipliers.size()) {
    return absl::StrCat(b.multipliers.size(), " multipliers where others have ",
                        a.multipliers.size());
  }
  for (size_t group = 0; group < a.multipliers.size(); ++group) {
    if (a.multipliers[group] == b.multipliers[group]) continue;
    char text[128];
    // StrCat has six digits, with which two multipliers that differ may look alike.
    std::snprintf(text, sizeof(text), "multiplier %.17g of group %zu where others have %.17g",
                  b.multipliers[group], group, a.multipliers[group]);
    return text;
  }
  return "";
}

double GlobalNorm(absl::Span<const double> group_sums, const GradientScale& scale) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  double squared_norm = 0;
  for (size_t group = 0; group < group_sums.size(); ++group) {
    squared_norm += SquaredNorm(group_sums[group], scale, group);
  }
  return std::sqrt(squared_norm);
}

std::vector<double> GroupNorms(absl::Span<const double> group_sums, const GradientScale& scale) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  std::vector<double> norms;
  norms.reserve(group_sums.size());
  for (size_t group = 0; group < group_sums.size(); ++group) {
    norms.push_back(std::sqrt(SquaredNorm(group_sums[group], scale, group)));
  }
  return norms;
}

double BlockSumOfSquaresReference(const void* gradient, DType dtype, int64_t elements) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  return SumOfSquares(gradient, dtype, elements);
}

Decision Decide(absl::Span<const double> group_sums, const GradientScale& scale,
                const Clipping& clipping) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  Decision decision;
  decision.norm = GlobalNorm(group_sums, scale);
  // A gradient that is not finite, or squares whose sum is not: no multiplier mends that.
  if (!std::isfinite(decision.norm)) return decision;

  if (clipping.max_norm > 0) {
    // The formula of torch.nn.utils.clip_grad_norm_, with its 1e-6.
    decision.clip_coefficient = std::min(1.0, clipping.max_norm / (decision.norm + 1e-6));
  }
  for (size_t group = 0; group < group_sums.size(); ++group) {
    // Validate lets only one of the two factors differ from 1, so their product is exact.
    const float multiplier =
        Multiplier(decision.clip_coefficient * MultiplierOf(clipping, group), scale, group);
    // Zero would drop the gradient without a word, and a denormal lose its digits; infinity would
    // spoil the state.
    if (!std::isnormal(multiplier)) {
      decision.multipliers.clear();
      return decision;
    }
    decision.multipliers.push_back(multiplier);
  }
  decision.apply = true;
  return decision;
}

float MultiplierWithinNorm(const GradientScale& scale, const Clipping& clipping, int group) {
  // Decide's clip_coefficient is 1 then, and a product with 1 is exact: the bits are the same.
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  return Multiplier(MultiplierOf(clipping, group), scale, group);
}

}  // namespace ballast
