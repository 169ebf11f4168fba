#include "cpu_optimizer_service/kernels/roofline.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

// This file is compiled once per instruction set, by including itself; the order of these matters.
// clang-format off
#include "cpu_optimizer_service/kernels/instruction_sets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optimizer_service/kernels/roofline.cc"
#include "hwy/foreach_target.h"

#include "absl/types/span.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using HalvesTag = hn::ScalableTag<uint16_t>;
using HalvesVec = hn::Vec<HalvesTag>;

// kBytes that were loaded, a multiple of 64.
template <size_t kBytes>
class Moved {
 public:
  HWY_INLINE Moved(const uint16_t* from, HalvesVec bits) {
    for (size_t i = 0; i < kVectors; ++i) {
      vectors_[i] = hn::Or(hn::LoadU(HalvesTag(), from + i * hn::Lanes(HalvesTag())), bits);
    }
  }
  HWY_INLINE void Store(uint16_t* to) const {
    for (size_t i = 0; i < kVectors; ++i) {
      hn::StoreU(vectors_[i], HalvesTag(), to + i * hn::Lanes(HalvesTag()));
    }
  }
  HWY_INLINE void Stream(uint16_t* to, size_t bytes) const {
    for (size_t i = 0; i < bytes / sizeof(vectors_[0]); ++i) {
      hn::Stream(vectors_[i], HalvesTag(), to + i * hn::Lanes(HalvesTag()));
    }
  }

 private:
  static constexpr size_t kVectors = kBytes / 2 / hn::MaxLanes(HalvesTag());
  HalvesVec vectors_[kVectors];
};

template <size_t kBytes>
HWY_INLINE void PrefetchLines(const uint16_t* data, size_t elements, size_t ahead) {
  const char* const first = reinterpret_cast<const char*>(data) + ahead * kBytes / elements;
  for (size_t byte = 0; byte < kBytes; byte += 64) hwy::Prefetch(first + byte);
}

// kElements at a time, which are kBytes of each stream. The first has at least as many bytes as the
// shard. Loads come before stores: where arrays lie at the same place in their pages, a load would else
// wait for the store before it.
template <size_t kElements, size_t... kBytes, size_t... kStream>
HWY_INLINE void MoveStreams(std::index_sequence<kStream...>, const UpdateTraffic& t,
                            const std::array<uint16_t*, sizeof...(kBytes)>& streams, size_t ahead,
                            uint16_t mask) {
  const HalvesTag d;
  for (size_t at = 0; at < static_cast<size_t>(t.elements); at += kElements) {
    HalvesVec bits = hn::Zero(d);
    for (size_t i = 0; i < kElements; i += hn::Lanes(d)) {
      bits = hn::Or(bits, hn::LoadU(d, t.gradient + at + i));
    }
    bits = hn::And(bits, hn::Set(d, mask));
    const auto place = [&](size_t stream, size_t bytes)
                           HWY_ATTR { return streams[stream] + at * bytes / kElements / 2; };
    const std::tuple moved(Moved<kBytes>(place(kStream, kBytes), bits)...);
    (std::get<kStream>(moved).Store(place(kStream, kBytes)), ...);
    std::get<0>(moved).Stream(t.shard + at, 2 * kElements);
    for (const Plane plane : {Plane::kExpAvgScale, Plane::kExpAvgSqScale}) {
      auto* const scales = t.state.As<uint32_t>(plane);
      if (scales != nullptr) scales[at / kPackedGroup] |= hn::GetLane(bits) * 0x10001u;
    }
    if (ahead == 0) continue;
    PrefetchLines<2 * kElements>(t.gradient + at, kElements, ahead);
    (PrefetchLines<kBytes>(place(kStream, kBytes), kElements, ahead), ...);
  }
  hwy::FlushStream();
}

template <size_t kElements, size_t... kBytes>
HWY_NOINLINE void Move(const UpdateTraffic& traffic, size_t ahead, uint16_t mask) {
  std::array<uint16_t*, sizeof...(kBytes)> streams = {};
  size_t count = 0;
  for (int kind = 0; kind < kStoredPlaneKinds; ++kind) {
    const auto plane = static_cast<Plane>(kind);
    if (IsScale(plane) || traffic.state.planes[kind] == nullptr) continue;
    streams[count++] = traffic.state.As<uint16_t>(plane);
  }
  constexpr std::make_index_sequence<sizeof...(kBytes)> kEach;
  MoveStreams<kElements, kBytes...>(kEach, traffic, streams, ahead, mask);
}

// The streams of `planes` planes of values, in the order of their kinds: the remainders are last.
HWY_NOINLINE void MoveState(const UpdateTraffic& t, size_t planes, size_t ahead, uint16_t mask) {
  if (t.state.format == StateFormat::k8Bit) return Move<64, 128, 64, 64, 128>(t, ahead, mask);
  if (t.state.format == StateFormat::kBFloat16) {
    if (planes == 1) return Move<32, 64, 64>(t, ahead, mask);
    if (planes == 2) return Move<32, 64, 64, 64>(t, ahead, mask);
    if (planes == 3) return Move<32, 64, 64, 64, 64>(t, ahead, mask);
    return Move<32, 64, 64, 64, 64, 64>(t, ahead, mask);
  }
  if (planes == 1) return Move<32, 128>(t, ahead, mask);
  if (planes == 2) return Move<32, 128, 128>(t, ahead, mask);
  if (planes == 3) return Move<32, 128, 128, 128>(t, ahead, mask);
  Move<32, 128, 128, 128, 128>(t, ahead, mask);
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>

namespace ballast {
namespace {
HWY_EXPORT(MoveState);
}  // namespace

void MoveTraffic(const UpdateTraffic& traffic, int prefetch_ahead_elements, uint16_t mask) {
  const auto of_values = absl::MakeConstSpan(traffic.state.planes).first(kPlaneKinds);
  const auto planes = std::ranges::count_if(of_values, [](void* each) { return each != nullptr; });
  HWY_DYNAMIC_DISPATCH(MoveState)
  (traffic, static_cast<size_t>(planes), static_cast<size_t>(prefetch_ahead_elements), mask);
}

}  // namespace ballast
#endif  // HWY_ONCE
