#include "cpu_optimizer_service/common/plane.h"

#include <algorithm>
#include <array>

#include "cpu_optimizer_service/common/rounding.h"

namespace ballast {
namespace {

constexpr std::array<absl::string_view, 3> kStateFormatNames = {"fp32", "bf16", "8bit"};

}  // namespace

absl::string_view Name(StateFormat format) {
  return kStateFormatNames[static_cast<size_t>(format)];
}

std::optional<StateFormat> FindStateFormat(absl::string_view name) {
  const auto found = std::ranges::find(kStateFormatNames, name);
  if (found == kStateFormatNames.end()) return std::nullopt;
  return static_cast<StateFormat>(found - kStateFormatNames.begin());
}

StoredPlanes StoredPlanesOf(PlaneList planes, StateFormat format) {
  StoredPlanes stored(planes.begin(), planes.end());
  if (format != StateFormat::kFloat32) stored.push_back(Plane::kMasterRemainder);
  if (format == StateFormat::k8Bit) {
    stored.insert(stored.end(), {Plane::kExpAvgScale, Plane::kExpAvgSqScale});
  }
  return stored;
}

int64_t StoredCount(Plane stored, int64_t elements) {
  return DivideUp(elements, ElementsPerNumber(stored));
}

int64_t StoredBytes(StateFormat format, Plane stored, int64_t elements) {
  const auto size = [&]() -> int64_t {
    if (format == StateFormat::kFloat32 || IsScale(stored)) return sizeof(float);
    const bool is_master = stored == Plane::kMaster || stored == Plane::kMasterRemainder;
    return format == StateFormat::kBFloat16 || is_master ? sizeof(uint16_t) : sizeof(uint8_t);
  };
  return StoredCount(stored, elements) * size();
}

}  // namespace ballast
