#include "cpu_optimizer_service/kernels/roofline.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

// This file is compiled once per instruction set, by including itself; the order of these matters.
// clang-format off
#include "cpu_optimizer_service/kernels/instruction_sets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optimizer_service/kernels/roofline.cc"
#include "hwy/foreach_target.h"

#include "cpu_optimizer_service/kernels/conversion-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The 16-bit shard: the upper halves of the first plane.
template <class DF>
HWY_INLINE void StreamUpperHalves(DF df, hn::Vec<DF> low, hn::Vec<DF> high, uint16_t* to) {
  const hn::RebindToSigned<DF> di;
  const hn::RebindToUnsigned<DF> du;
  const hn::Repartition<uint16_t, DF> d16;
  const hn::Half<decltype(d16)> d16_half;
  const auto half = [&](hn::Vec<DF> value) HWY_ATTR {
    return hn::DemoteTo(d16_half, hn::BitCast(di, hn::ShiftRight<16>(hn::BitCast(du, value))));
  };
  hn::Stream(hn::Combine(d16, half(high), half(low)), d16, to);
}

// Loads come before stores: where arrays lie at the same place in their pages, a load would else
// wait for the store before it.
template <size_t... kPlane, class DF>
HWY_INLINE hn::Vec<DF> MoveVector(std::index_sequence<kPlane...>, DF df, const UpdateTraffic& t,
                                  size_t at, float zero) {
  const auto nothing = hn::Mul(LoadAs<DType::kBFloat16>(df, t.gradient, at), hn::Set(df, zero));
  const hn::Vec<DF> moved[] = {hn::Add(hn::LoadU(df, t.planes[kPlane] + at), nothing)...};
  (hn::StoreU(moved[kPlane], df, t.planes[kPlane] + at), ...);
  return moved[0];
}

// `zero` is 0, which the compiler does not know: it would leave out a store of what was loaded.
template <size_t kPlanes>
HWY_NOINLINE void MovePlanes(const UpdateTraffic& traffic, size_t prefetch_ahead, float zero) {
  constexpr std::make_index_sequence<kPlanes> kEach;
  const hn::ScalableTag<float> df;
  using FloatVec = hn::Vec<decltype(df)>;
  const size_t lanes = hn::Lanes(df);
  const UpdateTraffic t = traffic;  // A copy that no store can change.
  constexpr size_t kLines = 32;     // Elements of a cache line of gradient, and two of each plane.
  const size_t turn = std::max(kLines, 2 * lanes);
  for (size_t begin = 0; begin < static_cast<size_t>(t.elements); begin += turn) {
    for (size_t i = begin; i < begin + turn; i += 2 * lanes) {
      const FloatVec low = MoveVector(kEach, df, t, i, zero);
      const FloatVec high = MoveVector(kEach, df, t, i + lanes, zero);
      StreamUpperHalves(df, low, high, t.shard + i);
    }
    if (prefetch_ahead != 0) {
      hwy::Prefetch(t.gradient + begin + prefetch_ahead);
      for (size_t plane = 0; plane < kPlanes; ++plane) {
        hwy::Prefetch(t.planes[plane] + begin + prefetch_ahead);
        hwy::Prefetch(t.planes[plane] + begin + prefetch_ahead + kLines / 2);
      }
    }
  }
  hwy::FlushStream();
}

HWY_NOINLINE void Move(const UpdateTraffic& traffic, size_t prefetch_ahead, float zero) {
  if (traffic.planes[1] == nullptr) return MovePlanes<1>(traffic, prefetch_ahead, zero);
  if (traffic.planes[2] == nullptr) return MovePlanes<2>(traffic, prefetch_ahead, zero);
  if (traffic.planes[3] == nullptr) return MovePlanes<3>(traffic, prefetch_ahead, zero);
  MovePlanes<4>(traffic, prefetch_ahead, zero);
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast {
namespace {
HWY_EXPORT(Move);
}  // namespace

void MoveTraffic(const UpdateTraffic& traffic, int prefetch_ahead_elements) {
  static const volatile float zero = 0;
  HWY_DYNAMIC_DISPATCH(Move)(traffic, static_cast<size_t>(prefetch_ahead_elements), zero);
}

}  // namespace ballast
#endif  // HWY_ONCE
