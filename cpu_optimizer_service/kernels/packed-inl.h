// Updates of packed state (common/packed/codes.h): a turn is unpacked, computed by the kernel of its
// rule (turns-inl.h), and packed. Included once per instruction set.
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu_optimizer_service/common/packed/codes.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/kernels/packed_turn.h"
#include "cpu_optimizer_service/kernels/turns-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using IntTag = hn::RebindToSigned<FloatTag>;
using BitsTag = hn::RebindToUnsigned<FloatTag>;

// ---- One vector of values from and to what is stored

HWY_INLINE FloatVec UnpackMaster(const uint16_t* weights, const uint16_t* remainders) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::Rebind<int16_t, FloatTag> di16;
  const auto high = hn::PromoteTo(BitsTag(), hn::LoadU(d16, weights));
  const auto low = hn::PromoteTo(IntTag(), hn::BitCast(di16, hn::LoadU(d16, remainders)));
  return hn::BitCast(FloatTag(), hn::Add(hn::ShiftLeft<16>(high), hn::BitCast(BitsTag(), low)));
}

HWY_INLINE void PackMaster(FloatVec master, uint16_t* weights, uint16_t* remainders) {
  const BitsTag du;
  const hn::Rebind<uint16_t, FloatTag> d16;
  const auto bits = hn::BitCast(du, master);
  const auto high = hn::ShiftRight<16>(hn::Add(bits, hn::Set(du, 0x8000u)));
  const auto low = hn::And(bits, hn::Set(du, 0xffffu));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(IntTag(), high)), d16, weights);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(IntTag(), low)), d16, remainders);
}

using IntVec = hn::Vec<IntTag>;

HWY_INLINE FloatVec ValuesOf(const CodeTable& table, IntVec codes, float scale) {
  const FloatTag d;
  const IntVec bits = hn::Add(hn::ShiftLeft<kCodeShift>(codes), hn::Set(IntTag(), table.c_bits));
  const FloatVec part =
      hn::Mul(hn::Sub(hn::BitCast(d, bits), hn::Set(d, table.c)), hn::Set(d, table.inverse_d));
  return hn::Mul(part, hn::Set(d, scale));
}

HWY_INLINE IntVec CodesOf(const CodeTable& table, FloatVec magnitudes, float factor,
                          const int32_t* u) {
  const FloatTag d;
  const FloatVec part = hn::Mul(magnitudes, hn::Set(d, factor));
  const FloatVec y = hn::Add(hn::Mul(part, hn::Set(d, table.d)), hn::Set(d, table.c));
  const IntVec above = hn::Sub(hn::BitCast(IntTag(), y), hn::Set(IntTag(), table.c_bits));
  return hn::ShiftRight<kCodeShift>(hn::Add(above, hn::LoadU(IntTag(), u)));
}

template <bool kCareful>
HWY_INLINE FloatVec UnpackExpAvg(const int8_t* codes, float scale) {
  const FloatTag d;
  const IntTag di;
  const hn::Rebind<int8_t, FloatTag> d8;
  const IntVec q = hn::PromoteTo(di, hn::LoadU(d8, codes));
  const FloatVec value = ValuesOf(kExpAvgCodes, hn::Abs(q), scale);
  return PIf<kCareful>(
      hn::BitCast(d, hn::Or(hn::BitCast(di, value), hn::And(q, hn::Set(di, INT32_MIN)))));
}

HWY_INLINE void PackExpAvg(FloatVec m, float factor, const int32_t* u, int8_t* codes) {
  const hn::Rebind<int8_t, FloatTag> d8;
  const IntVec q = CodesOf(kExpAvgCodes, hn::Abs(m), factor, u);
  const IntVec sign = hn::ShiftRight<31>(hn::BitCast(IntTag(), m));
  hn::StoreU(hn::DemoteTo(d8, hn::Sub(hn::Xor(q, sign), sign)), d8, codes);
}

template <bool kCareful>
HWY_INLINE FloatVec UnpackExpAvgSq(const uint8_t* codes, float scale) {
  const hn::Rebind<uint8_t, FloatTag> d8;
  const IntVec q = hn::PromoteTo(IntTag(), hn::LoadU(d8, codes));
  return PIf<kCareful>(ValuesOf(kExpAvgSqCodes, q, scale));
}

HWY_INLINE void PackExpAvgSq(FloatVec v, float factor, const int32_t* u, uint8_t* codes) {
  const IntTag di;
  const hn::Rebind<uint8_t, FloatTag> d8;
  const IntVec q = CodesOf(kExpAvgSqCodes, v, factor, u);
  // Not negative: so its bits are 0, or at least 1.
  const IntVec least = hn::Min(hn::BitCast(di, v), hn::Set(di, 1));
  hn::StoreU(hn::DemoteTo(d8, hn::Max(q, least)), d8, codes);
}

HWY_INLINE void PackBFloat16(FloatVec value, uint16_t* to) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const auto bits = FloatToBFloat16Bits(FloatTag(), value);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(IntTag(), bits)), d16, to);
}

// ---- One turn

template <class Kernel, StateFormat kFormat>
struct TurnValues {
  alignas(64) float planes[Kernel::kPlanes][PackedTurnElements(kFormat)];
  float scales[Kernel::kPlanes];  // 8bit: of the moments.
};

// The new values of the turn at `from`. False: the quick way does not do.
template <class Kernel, StateFormat kFormat, DType kGradient, bool kCareful>
HWY_INLINE bool ComputePackedTurn(const PackedPlaces& from, const void* gradient,
                                  const typename Kernel::Scalars& s,
                                  TurnValues<Kernel, kFormat>& values) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  LargeMask large = hn::FirstN(IntTag(), lanes);
  FloatVec largest = hn::Zero(d);
  FloatVec largest_sq = hn::Zero(d);
  for (size_t i = 0; i < PackedTurnElements(kFormat); i += lanes) {
    PlaneVecs<Kernel> planes;
    planes[0] = UnpackMaster(from.weights + i, from.remainders + i);
    if constexpr (kFormat == StateFormat::k8Bit) {
      planes[1] = UnpackExpAvg<kCareful>(from.As<int8_t>(1) + i, *from.scales[1]);
      planes[2] = UnpackExpAvgSq<kCareful>(from.As<uint8_t>(2) + i, *from.scales[2]);
    } else {
      for (size_t place = 1; place < Kernel::kPlanes; ++place) {
        planes[place] = LoadAs<DType::kBFloat16>(d, from.codes[place], i);
      }
    }
    Kernel::template Compute<kCareful>(s, LoadAs<kGradient>(d, gradient, i), planes, large);
    ForEachPlace<Kernel>([&](auto place)
                             HWY_ATTR { hn::Store(planes[place], d, values.planes[place] + i); });
    if constexpr (kFormat == StateFormat::k8Bit) {
      largest = hn::Max(largest, hn::Abs(planes[1]));
      largest_sq = hn::Max(largest_sq, planes[2]);
    }
  }
  if constexpr (kFormat == StateFormat::k8Bit) {
    values.scales[1] = hn::GetLane(hn::MaxOfLanes(d, largest));
    values.scales[2] = hn::GetLane(hn::MaxOfLanes(d, largest_sq));
  }
  return kCareful || hn::AllTrue(IntTag(), large);
}

template <class Kernel, StateFormat kFormat>
HWY_INLINE void PackTurn(const TurnValues<Kernel, kFormat>& values, const PackedThresholds& u,
                         const PackedPlaces& to) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  constexpr size_t kElements = PackedTurnElements(kFormat);
  for (size_t i = 0; i < kElements; i += lanes) {
    PackMaster(hn::Load(d, values.planes[0] + i), to.weights + i, to.remainders + i);
  }
  if constexpr (kFormat == StateFormat::k8Bit) {
    *to.scales[1] = values.scales[1];
    *to.scales[2] = values.scales[2];
    const float factor = FactorOf(values.scales[1]);
    const float factor_sq = FactorOf(values.scales[2]);
    for (size_t i = 0; i < kElements; i += lanes) {
      PackExpAvg(hn::Load(d, values.planes[1] + i), factor, u.exp_avg.data() + i,
                 to.As<int8_t>(1) + i);
      PackExpAvgSq(hn::Load(d, values.planes[2] + i), factor_sq, u.exp_avg_sq.data() + i,
                   to.As<uint8_t>(2) + i);
    }
  } else {
    for (size_t place = 1; place < Kernel::kPlanes; ++place) {
      for (size_t i = 0; i < kElements; i += lanes) {
        PackBFloat16(hn::Load(d, values.planes[place] + i), to.As<uint16_t>(place) + i);
      }
    }
  }
}

// What goes out of the turn's weights.
template <DType kShard>
HWY_INLINE void StoreShard(const float* values, size_t elements, void* shard, bool stream) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < elements; i += 2 * lanes) {
    StorePairAs<kShard>(d, hn::Load(d, values + i), hn::Load(d, values + i + lanes), shard, i,
                        stream);
  }
}

HWY_INLINE void StoreWeights(const uint16_t* weights, size_t elements, uint16_t* shard,
                             bool stream) {
  const hn::ScalableTag<uint16_t> d;
  for (size_t i = 0; i < elements; i += hn::Lanes(d)) {
    if (stream) {
      hn::Stream(hn::LoadU(d, weights + i), d, shard + i);
    } else {
      hn::StoreU(hn::LoadU(d, weights + i), d, shard + i);
    }
  }
}

// One turn of `elements`, from and to places that have room for a whole one.
template <class Kernel, StateFormat kFormat, DType kGradient>
HWY_INLINE void UpdatePackedTurn(const PackedPlaces& from, const PackedPlaces& to,
                                 const void* gradient, void* shard, DType shard_dtype, bool stream,
                                 const typename Kernel::Scalars& s, const PackedThresholds& u,
                                 RedoWriter* redo, int64_t& careful_turns) {
  constexpr size_t kElements = PackedTurnElements(kFormat);
  TurnValues<Kernel, kFormat> values;
  const auto compute = [&]<bool kCareful>(std::bool_constant<kCareful>) HWY_ATTR {
    return ComputePackedTurn<Kernel, kFormat, kGradient, kCareful>(from, gradient, s, values);
  };
  if (careful_turns == 0 && !compute(std::false_type()))
    careful_turns = kCarefulElements / kElements;
  if (careful_turns > 0) {
    compute(std::true_type());
    --careful_turns;
  }
  if (redo == nullptr) {
    PackTurn<Kernel, kFormat>(values, u, to);
  } else {
    const PackedPlaces record = PlacesOfTurn(redo->next(), kFormat, Kernel::kPlanes);
    PackTurn<Kernel, kFormat>(values, u, record);
    redo->Record(kElements);
    CopyTurn(kFormat, Kernel::kPlanes, record, to, kElements);
  }
  if (shard == nullptr) return;
  switch (shard_dtype) {
    case DType::kBFloat16:
      return StoreWeights(to.weights, kElements, static_cast<uint16_t*>(shard), stream);
    case DType::kFloat16:
      return StoreShard<DType::kFloat16>(values.planes[0], kElements, shard, stream);
    case DType::kFloat32:
      return StoreShard<DType::kFloat32>(values.planes[0], kElements, shard, stream);
  }
}

// Less than a turn, in a padded copy.
template <class Kernel, StateFormat kFormat, DType kGradient>
HWY_NOINLINE void UpdatePackedTail(const PackedPlaces& from, const PackedPlaces& to,
                                   const void* gradient, void* shard, DType shard_dtype,
                                   size_t elements, const typename Kernel::Scalars& s,
                                   const PackedThresholds& u, RedoWriter* redo) {
  RedoTurn scratch = {};
  const PackedPlaces padded = PlacesOfTurn(scratch, kFormat, Kernel::kPlanes);
  float padded_gradient[kPackedGroup] = {};
  alignas(64) float padded_shard[kPackedGroup];
  CopyTurn(kFormat, Kernel::kPlanes, from, padded, elements);
  std::memcpy(padded_gradient, gradient, elements * SizeBytes(kGradient));
  int64_t careful_turns = 0;
  UpdatePackedTurn<Kernel, kFormat, kGradient>(padded, padded, padded_gradient,
                                               shard == nullptr ? nullptr : padded_shard,
                                               shard_dtype, false, s, u, nullptr, careful_turns);
  if (redo != nullptr) {
    redo->next() = scratch;
    redo->Record(static_cast<int64_t>(elements));
  }
  CopyTurn(kFormat, Kernel::kPlanes, padded, to, elements);
  if (shard != nullptr) std::memcpy(shard, padded_shard, elements * SizeBytes(shard_dtype));
}

template <class Kernel, StateFormat kFormat>
HWY_INLINE void PrefetchTurn(const PackedPlaces& places, const void* gradient, DType dtype,
                             size_t ahead) {
  constexpr size_t kLineBytes = 64;
  const auto fetch = [](const void* data, size_t begin, size_t bytes) HWY_ATTR {
    for (size_t byte = begin; byte < begin + bytes; byte += kLineBytes) {
      hwy::Prefetch(static_cast<const char*>(data) + byte);
    }
  };
  constexpr size_t kElements = PackedTurnElements(kFormat);
  constexpr size_t kCodeBytes = kFormat == StateFormat::k8Bit ? 1 : 2;
  fetch(gradient, ahead * SizeBytes(dtype), kElements * SizeBytes(dtype));
  fetch(places.weights, ahead * 2, kElements * 2);
  fetch(places.remainders, ahead * 2, kElements * 2);
  for (size_t place = 1; place < Kernel::kPlanes; ++place) {
    fetch(places.codes[place], ahead * kCodeBytes, kElements * kCodeBytes);
    if (kFormat != StateFormat::k8Bit) continue;
    fetch(places.scales[place], ahead / kElements * sizeof(float), sizeof(float));
  }
}

template <class Kernel, StateFormat kFormat, DType kGradient>
HWY_NOINLINE void UpdatePackedRun(const PackedRun& run, const typename Kernel::Scalars& scalars,
                                  RedoWriter* redo) {
  constexpr size_t kPrefetchAhead = 1024;
  constexpr size_t kElements = PackedTurnElements(kFormat);
  const typename Kernel::Scalars s = scalars;
  const PackedThresholds u(run.rule.update_count);
  const PlaneList planes = PlanesOf(*run.rule.values);
  PackedPlaces from = PlacesAt(run.from, planes, run.from_begin);
  PackedPlaces to = PlacesAt(run.to, planes, run.to_begin);
  const auto* gradient = static_cast<const std::byte*>(run.rule.gradient);
  auto* shard = static_cast<std::byte*>(run.rule.shard);
  const DType shard_dtype = run.rule.shard_dtype;
  const size_t vector_bytes = hn::Lanes(FloatTag()) * sizeof(float);
  const bool stream = shard != nullptr && shard != gradient &&
                      reinterpret_cast<uintptr_t>(shard) % vector_bytes == 0;
  int64_t careful_turns = 0;
  auto left = static_cast<size_t>(run.rule.elements);
  for (; left >= kElements; left -= kElements) {
    if (Kernel::IsCareful(s)) careful_turns = 1;
    UpdatePackedTurn<Kernel, kFormat, kGradient>(from, to, gradient, shard, shard_dtype, stream, s,
                                                 u, redo, careful_turns);
    PrefetchTurn<Kernel, kFormat>(from, gradient, kGradient, kPrefetchAhead);
    from = from.Behind(kElements, kFormat);
    to = to.Behind(kElements, kFormat);
    gradient += kElements * SizeBytes(kGradient);
    if (shard != nullptr) shard += kElements * SizeBytes(shard_dtype);
  }
  if (stream) hwy::FlushStream();
  if (left == 0) return;
  UpdatePackedTail<Kernel, kFormat, kGradient>(from, to, gradient, shard, shard_dtype, left, s, u,
                                               redo);
}

template <class Kernel, StateFormat kFormat>
void UpdateInFormat(const PackedRun& run, const typename Kernel::Scalars& s, RedoWriter* redo) {
  switch (run.rule.gradient_dtype) {
    case DType::kBFloat16:
      return UpdatePackedRun<Kernel, kFormat, DType::kBFloat16>(run, s, redo);
    case DType::kFloat16:
      return UpdatePackedRun<Kernel, kFormat, DType::kFloat16>(run, s, redo);
    case DType::kFloat32:
      return UpdatePackedRun<Kernel, kFormat, DType::kFloat32>(run, s, redo);
  }
}

HWY_INLINE const RuleRun& RuleOf(const PackedRun& run) { return run.rule; }
HWY_INLINE bool HasPlace(const PackedRun& run, size_t place) {
  return PlanesOf(*run.rule.values).size() > place;
}

template <class Kernel>
void UpdateByKernel(const PackedRun& run, const typename Kernel::Scalars& s, RedoWriter* redo) {
  if constexpr (Kernel::kPlanes == 3) {  // Adam's without amsgrad (CheckStateFormat).
    if (run.from.format == StateFormat::k8Bit) {
      return UpdateInFormat<Kernel, StateFormat::k8Bit>(run, s, redo);
    }
  }
  Check(run.from.format == StateFormat::kBFloat16, "packed state has a format of its rule");
  UpdateInFormat<Kernel, StateFormat::kBFloat16>(run, s, redo);
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_
