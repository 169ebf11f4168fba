// The places of a chunk's planes.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SLOT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SLOT_H_

#include <array>

#include "cpu_optimizer_service/common/plane.h"

namespace ballast {

// The fp32 planes of one chunk, by kind; those that a group does not have are null.
struct Slot {
  std::array<float*, kPlaneKinds> planes = {};
  float* operator[](Plane plane) const { return planes[static_cast<int>(plane)]; }
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SLOT_H_
