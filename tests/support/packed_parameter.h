// A parameter's state in a format, alone in a slot.
#ifndef BALLAST_TESTS_SUPPORT_PACKED_PARAMETER_H_
#define BALLAST_TESTS_SUPPORT_PACKED_PARAMETER_H_

#include <cstddef>
#include <list>
#include <vector>

#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/common/rounding.h"

namespace ballast {

class PackedParameter {
 public:
  PackedParameter(PlaneList planes, StateFormat format, int64_t elements) : elements_(elements) {
    slot_.format = format;
    for (const Plane stored : StoredPlanesOf(planes, format)) {
      // As floats, so that each is aligned.
      memory_.emplace_back(StoredBytes(format, stored, RoundUp(elements, kPackedGroup)) / 4 + 1);
      slot_.planes[static_cast<size_t>(stored)] = memory_.back().data();
    }
  }
  PackedParameter(const PackedParameter&) = delete;
  PackedParameter& operator=(const PackedParameter&) = delete;

  const Slot& slot() const { return slot_; }
  std::vector<float> Read(Plane plane) const {
    std::vector<float> values(elements_);
    ReadPlane(slot_, plane, 0, absl::MakeSpan(values));
    return values;
  }

 private:
  const int64_t elements_;
  Slot slot_;
  std::list<std::vector<float>> memory_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_PACKED_PARAMETER_H_
