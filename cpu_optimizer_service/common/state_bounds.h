// How large the elements of a group's state can be at most, so that nearly every step is known to
// leave them finite without a look at any of them.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_

#include <limits>

#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

// Of magnitudes. Infinity: nothing is known.
struct StateBounds {
  double master = std::numeric_limits<double>::infinity();
  double exp_avg = std::numeric_limits<double>::infinity();
  double exp_avg_sq = std::numeric_limits<double>::infinity();  // And max_exp_avg_sq.

  // Whether this, or a magnitude that was measured, says that all elements are finite.
  bool finite() const;
};

// Of the state after an update by common/adam.h of elements within `before`, whichever update count
// they have, and of elements that are left as they are. `sum_of_squares` is that of the group's
// gradient as it came (gradient_norm.h). All infinite where a value of the formula might overflow.
//
//   G  = sqrt(sum_of_squares) * |multiplier|    no element is larger: a sum of squares, rounded
//        (+ weight_decay * W, with L2 decay)    at each addition, is not below any of them
//   M' = max(M, G)                              m is a mean of the old m and g
//   V' = max(V, G * G)
//   W' = W * max(1, |1 - lr * weight_decay|) + lr / (1 - beta1) * M' / eps
//
// each with a factor for what fp32 rounds up. The denominator is at least eps, so eps = 0 gives no
// bound. Where the quotient is bounded as crudely as here, W' rises by lr * 1e8 in a usual step:
// it reaches what fp32 holds after more steps than any training has.
StateBounds BoundsAfter(const StateBounds& before, const HyperParameters& values,
                        double sum_of_squares, float multiplier);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_
