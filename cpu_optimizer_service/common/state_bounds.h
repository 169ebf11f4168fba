// Upper bounds on the elements of a group's state. With them nearly every step is known to keep the
// state finite without a look at its elements. Each rule has its own (BoundsAfter in rule.h).
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "cpu_optimizer_service/common/plane.h"

namespace ballast {

struct StateBounds {
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();
  // Bounds of magnitudes, by a plane's place; 0 for places that the group does not have.
  std::array<double, kMaxPlanes> planes = {kUnknown, kUnknown, kUnknown, kUnknown};

  // Whether these bounds, or measured magnitudes, show that all elements are finite.
  bool finite() const {
    return std::ranges::all_of(planes, [](double bound) { return std::isfinite(bound); });
  }
  double master() const { return planes[0]; }
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATE_BOUNDS_H_
