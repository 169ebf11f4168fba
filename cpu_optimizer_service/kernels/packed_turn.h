// Where the planes of a turn of packed state lie: in a slot, or in a redo lane.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_PACKED_TURN_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_PACKED_TURN_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu_optimizer_service/common/packed/codes.h"
#include "cpu_optimizer_service/common/packed/slot.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"

namespace ballast {

// A turn of 8bit is a group with its scales; one of bf16 is as large as the ring has room for.
constexpr size_t PackedTurnElements(StateFormat format) {
  return format == StateFormat::k8Bit ? kPackedGroup : kPackedGroup / 2;
}

// Of a moment's code. StoredBytes says the same, but is a call.
constexpr size_t CodeBytes(StateFormat format) { return format == StateFormat::k8Bit ? 1 : 2; }

// By a plane's place in its group.
struct PackedPlaces {
  uint16_t* weights = nullptr;
  uint16_t* remainders = nullptr;
  std::array<void*, kMaxPlanes> codes = {};    // From place 1 on.
  std::array<float*, kMaxPlanes> scales = {};  // 8bit: from place 1 on.

  template <typename Element>
  Element* As(size_t place) const {
    return static_cast<Element*>(codes[place]);
  }
  void Advance(size_t elements, StateFormat format, size_t planes) {
    weights += elements;
    remainders += elements;
    for (size_t place = 1; place < planes; ++place) {
      codes[place] = As<std::byte>(place) + elements * CodeBytes(format);
      if (format == StateFormat::k8Bit) scales[place] += elements / kPackedGroup;
    }
  }
};

// From element `begin` of `slot` on, a multiple of kPackedGroup.
inline PackedPlaces PlacesAt(const Slot& slot, PlaneList planes, int64_t begin) {
  PackedPlaces places = {.weights = slot.As<uint16_t>(Plane::kMaster),
                         .remainders = slot.As<uint16_t>(Plane::kMasterRemainder)};
  for (size_t place = 1; place < planes.size(); ++place) {
    places.codes[place] = slot.As<void>(planes[place]);
  }
  if (slot.format == StateFormat::k8Bit) {
    places.scales[1] = slot.As<float>(Plane::kExpAvgScale);
    places.scales[2] = slot.As<float>(Plane::kExpAvgSqScale);
  }
  places.Advance(begin, slot.format, planes.size());
  return places;
}

inline PackedPlaces PlacesOfTurn(RedoTurn& turn, StateFormat format, size_t planes) {
  const size_t elements = PackedTurnElements(format);
  auto* at = reinterpret_cast<std::byte*>(turn.values);
  const auto take = [&](size_t bytes) {
    auto* const place = at;
    at += bytes;
    return place;
  };
  PackedPlaces places;
  places.weights = reinterpret_cast<uint16_t*>(take(2 * elements));
  places.remainders = reinterpret_cast<uint16_t*>(take(2 * elements));
  for (size_t place = 1; place < planes; ++place) {
    places.codes[place] = take(elements * CodeBytes(format));
  }
  for (size_t place = 1; place < planes && format == StateFormat::k8Bit; ++place) {
    places.scales[place] = reinterpret_cast<float*>(take(sizeof(float)));
  }
  return places;
}
static_assert(2 * 2 * kPackedGroup / 2 + 3 * kPackedGroup <= sizeof(RedoTurn), "bf16, amsgrad");
static_assert(2 * 2 * kPackedGroup + 2 * kPackedGroup + 2 * sizeof(float) <= sizeof(RedoTurn));

// Copies `elements` of a turn, and its scales.
inline void CopyTurn(StateFormat format, size_t planes, const PackedPlaces& from,
                     const PackedPlaces& to, size_t elements) {
  std::memcpy(to.weights, from.weights, 2 * elements);
  std::memcpy(to.remainders, from.remainders, 2 * elements);
  for (size_t place = 1; place < planes; ++place) {
    std::memcpy(to.codes[place], from.codes[place], elements * CodeBytes(format));
    if (format == StateFormat::k8Bit) *to.scales[place] = *from.scales[place];
  }
}

// Stores the first `count` elements of a recorded turn from element `begin` of `to` on, in any format.
inline void StoreTurn(RedoTurn& turn, PlaneList planes, const Slot& to, int64_t begin,
                      int64_t count) {
  if (to.format == StateFormat::kFloat32) {
    for (size_t place = 0; place < planes.size(); ++place) {
      std::copy_n(turn.plane(static_cast<int>(place)), count, to[planes[place]] + begin);
    }
    return;
  }
  if (count == 0) return;  // There is no scale in it either.
  const PackedPlaces from = PlacesOfTurn(turn, to.format, planes.size());
  CopyTurn(to.format, planes.size(), from, PlacesAt(to, planes, begin), count);
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_PACKED_TURN_H_
