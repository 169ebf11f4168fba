// State in the formats of codes.h: read and written as fp32 values, and updated.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_PACKED_STATE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_PACKED_STATE_H_

#include <cmath>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/packed/slot.h"
#include "cpu_optimizer_service/common/rule.h"

namespace ballast {

// A larger moment in a packed format counts as not finite: the reciprocal of its scale is no normal
// number.
inline constexpr float kMostPackedMoment = 0x1p126f;
inline bool Holds(StateFormat format, Plane plane, float value) {
  const bool limited = format != StateFormat::kFloat32 && plane != Plane::kMaster;
  return std::isfinite(value) && (!limited || std::fabs(value) <= kMostPackedMoment);
}
// The first value that no update leaves in such a plane: one that the format does not hold, or a
// negative one in a plane of squares.
std::optional<int64_t> FirstBadValue(Plane plane, StateFormat format,
                                     absl::Span<const float> values);
// Bounds after values within `bounds` are stored in the format.
StateBounds BoundsStored(StateBounds bounds, StateFormat format);

// Values of elements [begin, begin + out.size()) of `plane`, in any format.
void ReadPlane(const Slot& slot, Plane plane, int64_t begin, absl::Span<float> out);
// Stores them, rounded to nearest. In packed formats `begin` is a multiple of kPackedGroup, and no
// elements of the last group are behind the values.
void WritePlane(const Slot& slot, Plane plane, int64_t begin, absl::Span<const float> values);
// Copies what is stored of elements [begin, begin + elements) of all planes: parameters, from a multiple
// of kPackedGroup on, or padding.
void CopyStored(const Slot& from, const Slot& to, int64_t begin, int64_t elements);

// As RuleRun, for packed state. `rule.from` and `rule.to` are not used.
struct PackedRun {
  RuleRun rule;
  Slot from;
  Slot to;  // Of the same format.
  // The first elements, multiples of kPackedGroup; of bf16 any.
  int64_t from_begin = 0;
  int64_t to_begin = 0;
};

// The specification: the rule's reference on the values, which are then stored. The vector version is
// UpdatePacked in kernels.h.
void UpdatePackedReference(const PackedRun& run);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_PACKED_STATE_H_
