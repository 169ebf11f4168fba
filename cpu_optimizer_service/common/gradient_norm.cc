#include "cpu_optimizer_service/common/gradient_norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/base/attributes.h"
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

ABSL_ATTRIBUTE_NOINLINE double AddLeftToRight(absl::Span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

ABSL_ATTRIBUTE_NOINLINE double GlobalNorm(absl::Span<const double> group_sums,
                                          const GradientScale& scale) {
  double squared_norm = 0;
  for (size_t group = 0; group < group_sums.size(); ++group) {
    const double unscale = 1 / DivisorOf(scale, group);
    squared_norm += unscale * unscale * group_sums[group];
  }
  return std::sqrt(squared_norm);
}

float Multiplier(double clip_coefficient, const GradientScale& scale, size_t group) {
  return static_cast<float>(clip_coefficient / DivisorOf(scale, group));
}

}  // namespace

double BlockSumOfSquaresReference(const void* gradient, DType dtype, int64_t elements) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  return SumOfSquares(gradient, dtype, elements);
}

double SumInOrder(absl::Span<const double> values) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  return AddLeftToRight(values);
}

double ParameterSum(absl::Span<const double> block_sums) {
  std::vector<double> span_sums;
  for (size_t block = 0; block < block_sums.size(); block += kSpanBlocks) {
    span_sums.push_back(SumInOrder(block_sums.subspan(block, kSpanBlocks)));
  }
  return SumInOrder(span_sums);
}

Decision Decide(absl::Span<const double> group_sums, const GradientScale& scale, double max_norm) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  Decision decision;
  decision.norm = GlobalNorm(group_sums, scale);
  if (!std::isfinite(decision.norm)) return decision;

  if (max_norm > 0) {
    decision.clip_coefficient = std::min(1.0, max_norm / (decision.norm + 1e-6));
  }
  for (size_t group = 0; group < group_sums.size(); ++group) {
    const float multiplier = Multiplier(decision.clip_coefficient, scale, group);
    if (!std::isnormal(multiplier)) {
      decision.multipliers.clear();
      return decision;
    }
    decision.multipliers.push_back(multiplier);
  }
  decision.apply = true;
  return decision;
}

float UnclippedMultiplier(const GradientScale& scale, int group) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  return Multiplier(1.0, scale, group);
}

}  // namespace ballast
