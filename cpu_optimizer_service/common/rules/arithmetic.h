// What the rules' references and bounds share.
//
// Denormals count as zero, everywhere, by comparison, so that the hardware's flushing mode (FTZ,
// DAZ on x86; FZ on Arm) cannot show in a result:
//   Z(x) = +0 if |x| <  2^-126, else x          values read, and sums (a denormal sum is exact)
//   P(x) = +0 if |x| <= 2^-126, else x          products and quotients: 2^-126 itself may
//                                               be rounded up, depending on the mode
// Note `<` and `<=`: NaN passes both. All other operations are plain IEEE fp32 in the written order,
// without fused multiply-add.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ARITHMETIC_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ARITHMETIC_H_

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/state_bounds.h"

namespace ballast {

inline constexpr float kLeastNormal = 0x1p-126f;

inline float Z(float x) { return std::fabs(x) < kLeastNormal ? 0.0f : x; }
inline float P(float x) { return std::fabs(x) <= kLeastNormal ? 0.0f : x; }

// lr * sign(x). sign(0) = 0, and of NaN it is NaN.
inline float SignOf(float x, float lr) {
  return x == 0 || std::isnan(x) ? x : std::copysign(lr, x);
}

// A formula's scalar: computed in double, rounded to fp32, zero if denormal there.
float ToScalar(double x);
// A decision's multiplier, as formulas take it.
inline float SignedMultiplier(const HyperParameters& values, float multiplier) {
  return Z(values.maximize ? -multiplier : multiplier);
}

absl::Status ValidateNotNegative(absl::string_view name, double value);
absl::Status ValidateBeta(absl::string_view name, double value);  // At least 0, below 1.

// A bound's factor for fp32's rounding up. No more than 8 roundings by a factor of 1 + 2^-24 lie
// between a bound and what it is made of.
inline constexpr double kRounding = 1 + 0x1p-20;
// The bounds by place, if each of them and of `also` is far enough below what fp32 holds; else all
// unknown.
StateBounds Bounded(std::initializer_list<double> planes, std::initializer_list<double> also);

// Calls update(gradient, planes) for each element: the gradient read and Z of each plane's value. It
// sets the new values. The first plane's goes to the shard, too.
//
// An element of an array is read before its new value is stored, so sources and destinations may be
// the same arrays, and the shard may lie where the gradient was.
template <int kCount, typename Update>
void ForEachElement(const RuleRun& run, const Update& update) {
  for (int64_t i = 0; i < run.elements; ++i) {
    const float gradient = Z(LoadElement(run.gradient, run.gradient_dtype, i));
    float values[kCount];
    for (int place = 0; place < kCount; ++place) values[place] = Z(run.from[place][i]);
    update(gradient, values);
    for (int place = 0; place < kCount; ++place) run.to[place][i] = values[place];
    if (run.shard != nullptr) StoreElement(run.shard, run.shard_dtype, i, values[0]);
  }
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ARITHMETIC_H_
