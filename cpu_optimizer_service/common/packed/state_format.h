// The formats of a group's state. The values are the same planes in each; what is stored of them
// differs:
//
//               master                        moments
//   fp32        fp32                          fp32
//   bf16        bf16 weights, remainder       bf16
//   8bit        bf16 weights, remainder       a code of 8 bits, and a scale for 64 elements
//
//   plane       stored                                              bytes an element
//   master      bf16 weights: what is published                     2
//               master_remainder: 16 bits, so that master is fp32   2
//   a moment    bf16: rounded to nearest, ties to even              2
//   exp_avg     8bit: int8, and exp_avg_scale in fp32               1 + 1/16
//   exp_avg_sq  8bit: uint8, and exp_avg_sq_scale in fp32           1 + 1/16
//
// The weights are the master rounded to nearest, ties away from zero, so that
// bits(master) = (bits(weights) << 16) + remainder, the remainder being signed.
//
// A code is a small float behind a threshold c, relative to the largest magnitude of a group of 64
// consecutive elements of a parameter. F(q) is the fp32 number with the bits of c plus q << 20: 3 bits of
// mantissa. So steps are equal below c, and 6% to 12% of the value above it. In fp32, each operation
// rounded, P as in rules/arithmetic.h, for x in exp_avg (c = 2^-15, 127 codes and a sign) and exp_avg_sq
// (c = 2^-31, 255 codes), with D = F(127) - c or F(255) - c:
//
//   a = max |x|                                  the scale
//   y = |x| * (1 / max(a, 2^-126)) * D + c
//   q = (bits(y) - bits(c) + u) >> 20            at least 1 for exp_avg_sq > 0
//   |x| = P((F(q) - c) * (1 / D) * a)
//
// The largest element of a group is exact. What is read, and stored to nearest (u = 2^19), is as it was.
// Adam moves an element by about lr, however small its gradients are. So both moments need their range: in
// this format an element's gradients may be 10^4 times smaller than others' in its group.
//
// In an update u is a hash of the update's number and the element's place in its group, 0 to 2^20. Rounded
// to nearest, a moment whose change in an update is less than half a step of its code would never change:
// exp_avg_sq changes by a thousandth with a beta2 of 0.999. With u it changes as it should in the mean. u is
// a function of the update alone, so its bits are the same whoever makes it, and however often.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_STATE_FORMAT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_STATE_FORMAT_H_

#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/plane.h"

namespace ballast {

enum class StateFormat : uint8_t { kFloat32, kBFloat16, k8Bit };

absl::string_view Name(StateFormat format);  // "fp32", "bf16", "8bit".
std::optional<StateFormat> FindStateFormat(absl::string_view name);

// Elements with one scale. In every packed format a part of a parameter begins at a multiple.
inline constexpr int64_t kPackedGroup = 64;

// What is stored of a group with `planes`.
using StoredPlanes = absl::InlinedVector<Plane, kStoredPlaneKinds>;
StoredPlanes StoredPlanesOf(PlaneList planes, StateFormat format);
inline bool IsScale(Plane stored) {
  return stored == Plane::kExpAvgScale || stored == Plane::kExpAvgSqScale;
}
// Stored of `elements` of a parameter, from a multiple of kPackedGroup on: numbers, and bytes.
int64_t StoredCount(Plane stored, int64_t elements);
int64_t StoredBytes(StateFormat format, Plane stored, int64_t elements);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_STATE_FORMAT_H_
