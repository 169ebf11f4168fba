// The places of a chunk's planes.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_SLOT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_SLOT_H_

#include <array>

#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/plane.h"

namespace ballast {

// By kind; those that the chunk does not have are null. Elements are of the format (codes.h).
struct Slot {
  std::array<void*, kStoredPlaneKinds> planes = {};
  StateFormat format = StateFormat::kFloat32;

  template <typename Element>
  Element* As(Plane plane) const {
    return static_cast<Element*>(planes[static_cast<int>(plane)]);
  }
  // Of fp32.
  float* operator[](Plane plane) const {
    Check(format == StateFormat::kFloat32, "only fp32 state has planes of fp32");
    return As<float>(plane);
  }
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_SLOT_H_
