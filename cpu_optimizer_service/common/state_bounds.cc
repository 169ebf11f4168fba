#include "cpu_optimizer_service/common/state_bounds.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace ballast {
namespace {

// No more than 8 roundings by a factor of 1 + 2^-24 lie between a bound and what it is made of.
constexpr double kRounding = 1 + 0x1p-20;
// Half of what fp32 holds, so that a value which rounding takes above its bound is still finite.
constexpr double kLimit = FLT_MAX / 2;

}  // namespace

bool StateBounds::finite() const {
  return std::isfinite(master) && std::isfinite(exp_avg) && std::isfinite(exp_avg_sq);
}

StateBounds BoundsAfter(const StateBounds& before, const HyperParameters& values,
                        double sum_of_squares, float multiplier) {
  if (!before.finite()) return {};
  double gradient = kRounding * std::sqrt(sum_of_squares) * std::fabs(multiplier);
  // With L2 decay a part of the weight goes through the moments like the gradient.
  if (!values.decoupled_weight_decay) {
    gradient = kRounding * (gradient + values.weight_decay * before.master);
  }
  const StateBounds after = {
      .master = 0,
      .exp_avg = kRounding * std::max(before.exp_avg, gradient),
      .exp_avg_sq = kRounding * std::max(before.exp_avg_sq, gradient * gradient)};
  const double eps = values.eps < FLT_MIN ? 0 : values.eps;  // As MakeAdamScalars.
  const double quotient = after.exp_avg / eps;
  // 1 - beta1^t is smallest at t = 1, so this holds for every update count.
  const double step_size = values.bias_correction ? values.lr / (1 - values.beta1) : values.lr;
  const double decay =
      values.decoupled_weight_decay ? std::fabs(1 - values.lr * values.weight_decay) : 1.0;
  // The factor is at least 1: unused parameters of the group keep their weights.
  const double master = kRounding * (before.master * std::max(1.0, decay) + step_size * quotient);
  // Not `>`: a NaN is no bound either.
  for (const double value :
       {gradient, after.exp_avg, after.exp_avg_sq, quotient, step_size, decay, master}) {
    if (!(value <= kLimit)) return {};
  }
  return {.master = master, .exp_avg = after.exp_avg, .exp_avg_sq = after.exp_avg_sq};
}

}  // namespace ballast
