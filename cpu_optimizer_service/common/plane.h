// The fp32 planes of a parameter's state.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLANE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLANE_H_

#include <array>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast {

// Named as in torch.optim. Which of them a group has depends on its rule (rule.h).
enum class Plane : uint8_t { kMaster, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMomentumBuffer, kSum };
inline constexpr std::array<absl::string_view, 6> kPlaneNames = {
    "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"};
inline constexpr int kPlaneKinds = static_cast<int>(kPlaneNames.size());
inline absl::string_view Name(Plane plane) { return kPlaneNames[static_cast<int>(plane)]; }

// The most that a group has.
inline constexpr int kMaxPlanes = 4;
// Of a group, ascending, so kMaster is the first. A plane's index here is its *place*.
using PlaneList = absl::Span<const Plane>;

// Whether an update takes the plane's square roots, so that its values are 0 or more.
inline bool IsOfSquares(Plane plane) {
  return plane == Plane::kExpAvgSq || plane == Plane::kMaxExpAvgSq || plane == Plane::kSum;
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLANE_H_
