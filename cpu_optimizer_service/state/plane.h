// The planes of a chunk's state, and the slot that they lie in.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_PLANE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_PLANE_H_

#include <array>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace ballast {

enum class Plane : uint8_t { kMaster, kExpAvg, kExpAvgSq, kMaxExpAvgSq };
inline constexpr int kMaxPlanes = 4;
absl::string_view Name(Plane plane);  // "master", "exp_avg", ...

// The planes of one chunk, fp32; those that a group does not use are null.
struct Slot {
  std::array<float*, kMaxPlanes> planes = {};
  float* operator[](Plane plane) const { return planes[static_cast<int>(plane)]; }
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_PLANE_H_
