// Upper bounds on the elements of a group's state. With them nearly every step is known to keep the
// state finite without a look at its elements.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_

#include <limits>

#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

// Bounds of magnitudes. Infinity: unknown.
struct StateBounds {
  double master = std::numeric_limits<double>::infinity();
  double exp_avg = std::numeric_limits<double>::infinity();
  double exp_avg_sq = std::numeric_limits<double>::infinity();  // And max_exp_avg_sq.

  // Whether these bounds, or measured magnitudes, show that all elements are finite.
  bool finite() const;
};

// The bounds after an update by common/adam.h of elements within `before`, for any update count,
// and of elements that do not change. `sum_of_squares` is that of the group's gradient as received
// (gradient_norm.h). All infinite if a value of the formula might overflow.
//
//   G  = sqrt(sum_of_squares) * |multiplier|    no element is larger: a sum of squares, rounded
//        (+ weight_decay * W, with L2 decay)    at each addition, is not below any of them
//   M' = max(M, G)                              m is a mean of the old m and g
//   V' = max(V, G * G)
//   W' = W * max(1, |1 - lr * weight_decay|) + lr / (1 - beta1) * M' / eps
//
// each with a factor for fp32's rounding up. The denominator is at least eps, so eps = 0 gives no
// bound. With this crude bound of the quotient W' rises by lr * 1e8 in a usual step. It reaches
// fp32's limit only after more steps than any training has.
StateBounds BoundsAfter(const StateBounds& before, const HyperParameters& values,
                        double sum_of_squares, float multiplier);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_
