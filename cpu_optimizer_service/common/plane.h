// The planes of a parameter's state, and what is stored of them.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLANE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLANE_H_

#include <array>
#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast {

// Values, named as in torch.optim: which of them a group has depends on its rule (rule.h). Then what is
// stored beside a plane in fewer bytes (packed/codes.h), which is no plane of a group.
enum class Plane : uint8_t {
  kMaster,
  kExpAvg,
  kExpAvgSq,
  kMaxExpAvgSq,
  kMomentumBuffer,
  kSum,
  kMasterRemainder,
  kExpAvgScale,
  kExpAvgSqScale,
};
inline constexpr int kPlaneKinds = 6;  // Of values.
inline constexpr int kStoredPlaneKinds = 9;
inline constexpr std::array<absl::string_view, kStoredPlaneKinds> kStoredPlaneNames = {
    "master", "exp_avg",          "exp_avg_sq",    "max_exp_avg_sq",  "momentum_buffer",
    "sum",    "master_remainder", "exp_avg_scale", "exp_avg_sq_scale"};
inline constexpr auto kPlaneNames = absl::MakeConstSpan(kStoredPlaneNames).first(kPlaneKinds);
inline absl::string_view Name(Plane plane) { return kStoredPlaneNames[static_cast<int>(plane)]; }

// The most that a group has.
inline constexpr int kMaxPlanes = 4;
// Of a group, ascending, so kMaster is the first. A plane's index here is its *place*.
using PlaneList = absl::Span<const Plane>;

// Whether an update takes the plane's square roots, so that its values are 0 or more.
inline bool IsOfSquares(Plane plane) {
  return plane == Plane::kExpAvgSq || plane == Plane::kMaxExpAvgSq || plane == Plane::kSum;
}

// How the values of a group's planes are stored: packed/codes.h has the formulas.
enum class StateFormat : uint8_t { kFloat32, kBFloat16, k8Bit };
inline constexpr std::array kStateFormats = {StateFormat::kFloat32, StateFormat::kBFloat16,
                                             StateFormat::k8Bit};

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
// Elements for one stored number.
inline int64_t ElementsPerNumber(Plane stored) { return IsScale(stored) ? kPackedGroup : 1; }
// Stored of `elements` of a parameter, from a multiple of kPackedGroup on: numbers, and bytes.
int64_t StoredCount(Plane stored, int64_t elements);
int64_t StoredBytes(StateFormat format, Plane stored, int64_t elements);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLANE_H_
