// Updates of packed state (common/packed/codes.h): a turn is unpacked, computed by the kernel of its
// rule (turns-inl.h), and packed. Included once per instruction set.
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_PACKED_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

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
using IntVec = hn::Vec<IntTag>;
using BitsTag = hn::RebindToUnsigned<FloatTag>;
using HalvesTag = hn::Repartition<uint16_t, FloatTag>;
using SignedHalvesTag = hn::Repartition<int16_t, FloatTag>;

// ---- A vector of values from what is stored, and two of them to it

HWY_INLINE FloatVec UnpackMaster(const uint16_t* weights, const uint16_t* remainders) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::Rebind<int16_t, FloatTag> di16;
  const auto high = hn::PromoteTo(BitsTag(), hn::LoadU(d16, weights));
  const auto low = hn::PromoteTo(IntTag(), hn::BitCast(di16, hn::LoadU(d16, remainders)));
  return hn::BitCast(FloatTag(), hn::Add(hn::ShiftLeft<16>(high), hn::BitCast(BitsTag(), low)));
}

HWY_INLINE void PackMaster(FloatVec low, FloatVec high, uint16_t* weights, uint16_t* remainders) {
  const BitsTag du;
  const HalvesTag d16;
  const auto half = hn::Set(du, 0x8000u);
  const auto low_bits = hn::BitCast(du, low);
  const auto high_bits = hn::BitCast(du, high);
  hn::StoreU(UpperHalves(hn::Add(low_bits, half), hn::Add(high_bits, half)), d16, weights);
  hn::StoreU(LowerHalves(low_bits, high_bits), d16, remainders);
}

// Of two vectors.
HWY_INLINE void PackSums(FloatVec low, FloatVec high, uint32_t u, uint16_t* codes) {
  const auto rounded = [&](FloatVec sum) HWY_ATTR {
    const BitsTag du;
    const auto bits = hn::BitCast(du, sum);
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(sum)), bits, hn::Add(bits, hn::Set(du, u)));
  };
  hn::StoreU(UpperHalves(rounded(low), rounded(high)), HalvesTag(), codes);
}

HWY_INLINE FloatVec ValuesOf(const CodeTable& table, IntVec codes, float scale) {
  const FloatTag d;
  const IntVec bits = hn::Add(hn::ShiftLeft<kCodeShift>(codes), hn::Set(IntTag(), table.c_bits));
  const FloatVec part =
      hn::Mul(hn::Sub(hn::BitCast(d, bits), hn::Set(d, table.c)), hn::Set(d, table.inverse_d));
  return hn::Mul(part, hn::Set(d, scale));
}

// The codes, shifted left by kCodeShift; lower bits are undefined. `u_less_c`: u - bits(c).
HWY_INLINE IntVec CodesOf(const CodeTable& table, FloatVec magnitudes, float factor,
                          const int32_t* u_less_c) {
  const FloatTag d;
  const FloatVec part = hn::Mul(magnitudes, hn::Set(d, factor));
  const FloatVec y = hn::Add(hn::Mul(part, hn::Set(d, table.d)), hn::Set(d, table.c));
  return hn::Add(hn::BitCast(IntTag(), y), hn::LoadU(IntTag(), u_less_c));
}

// The codes of two vectors, which are their bits from kCodeShift on.
HWY_INLINE hn::Vec<SignedHalvesTag> CodesIn(IntVec low, IntVec high) {
  return hn::ShiftRight<kCodeShift - 16>(hn::BitCast(SignedHalvesTag(), UpperHalves(low, high)));
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

// Of two vectors from `values` on.
HWY_INLINE void PackExpAvg(const float* values, float factor, const int32_t* u_less_c,
                           int8_t* codes) {
  const FloatTag d;
  const hn::Rebind<int8_t, SignedHalvesTag> d8;
  // Negative ones have all bits inverted, the sign among them.
  const auto signed_codes = [&](size_t i) HWY_ATTR {
    const FloatVec m = hn::Load(d, values + i);
    const IntVec sign = hn::BroadcastSignBit(hn::BitCast(IntTag(), m));
    return hn::Xor(CodesOf(kExpAvgCodes, hn::Abs(m), factor, u_less_c + i), sign);
  };
  const auto q = CodesIn(signed_codes(0), signed_codes(hn::Lanes(d)));
  hn::StoreU(hn::DemoteTo(d8, hn::Sub(q, hn::BroadcastSignBit(q))), d8, codes);
}

template <bool kCareful>
HWY_INLINE FloatVec UnpackExpAvgSq(const uint8_t* codes, float scale) {
  const hn::Rebind<uint8_t, FloatTag> d8;
  const IntVec q = hn::PromoteTo(IntTag(), hn::LoadU(d8, codes));
  return PIf<kCareful>(ValuesOf(kExpAvgSqCodes, q, scale));
}

HWY_INLINE void PackExpAvgSq(const float* values, float factor, const int32_t* u_less_c,
                             uint8_t* codes) {
  const FloatTag d;
  const IntTag di;
  const hn::Rebind<uint8_t, SignedHalvesTag> d8;
  const auto at_least_1 = [&](size_t i) HWY_ATTR {
    const FloatVec v = hn::Load(d, values + i);
    // Not negative: so its bits are 0, or at least 1.
    const IntVec least = hn::ShiftLeft<kCodeShift>(hn::Min(hn::BitCast(di, v), hn::Set(di, 1)));
    return hn::Max(CodesOf(kExpAvgSqCodes, v, factor, u_less_c + i), least);
  };
  const auto q = CodesIn(at_least_1(0), at_least_1(hn::Lanes(d)));
  hn::StoreU(hn::DemoteTo(d8, q), d8, codes);
}

// ---- One turn

// What an update rounds by: u of its sums in bf16; u - bits(c) of its codes in 8bit.
struct UpdateThresholds {
  UpdateThresholds(StateFormat format, int64_t update_count) : sum(SumThreshold(update_count)) {
    if (format != StateFormat::k8Bit) return;
    const PackedThresholds u(update_count);
    for (size_t i = 0; i < kPackedGroup; ++i) {
      exp_avg[i] = u.exp_avg[i] - kExpAvgCodes.c_bits;
      exp_avg_sq[i] = u.exp_avg_sq[i] - kExpAvgSqCodes.c_bits;
    }
  }
  uint32_t sum;
  Thresholds exp_avg;
  Thresholds exp_avg_sq;
};

// Adam's moments of a turn of 8bit: they get their codes when the largest are known.
struct Moments {
  alignas(64) float exp_avg[kPackedGroup];
  alignas(64) float exp_avg_sq[kPackedGroup];
};

HWY_INLINE void PackMoments(const Moments& moments, FloatVec largest, FloatVec largest_sq,
                            const UpdateThresholds& u, const PackedPlaces& to) {
  const FloatTag d;
  const float scale = hn::GetLane(hn::MaxOfLanes(d, largest));
  const float scale_sq = hn::GetLane(hn::MaxOfLanes(d, largest_sq));
  *to.scales[1] = scale;
  *to.scales[2] = scale_sq;
  const float factor = FactorOf(scale);
  const float factor_sq = FactorOf(scale_sq);
  for (size_t i = 0; i < kPackedGroup; i += 2 * hn::Lanes(d)) {
    PackExpAvg(moments.exp_avg + i, factor, u.exp_avg.data() + i, to.As<int8_t>(1) + i);
    PackExpAvgSq(moments.exp_avg_sq + i, factor_sq, u.exp_avg_sq.data() + i, to.As<uint8_t>(2) + i);
  }
}

// The new state of the turn at `from`, into `record`. False: the quick way does not do.
template <class Kernel, StateFormat kFormat, DType kGradient, bool kCareful>
HWY_INLINE bool ComputePackedTurn(const PackedPlaces& from_places, const void* gradient,
                                  const typename Kernel::Scalars& s, const UpdateThresholds& u,
                                  const PackedPlaces& record_places) {
  const PackedPlaces from = from_places;  // Copies that no store can change.
  const PackedPlaces record = record_places;
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  LargeMask large = hn::FirstN(IntTag(), lanes);
  const auto compute = [&](size_t i, PlaneVecs<Kernel>& planes) HWY_ATTR {
    planes[0] = UnpackMaster(from.weights + i, from.remainders + i);
    if constexpr (kFormat == StateFormat::k8Bit) {
      planes[1] = UnpackExpAvg<kCareful>(from.As<int8_t>(1) + i, *from.scales[1]);
      planes[2] = UnpackExpAvgSq<kCareful>(from.As<uint8_t>(2) + i, *from.scales[2]);
    } else {
      ForEachPlace<Kernel>([&](auto place) HWY_ATTR {
        if (place > 0) planes[place] = LoadAs<DType::kBFloat16>(d, from.codes[place], i);
      });
    }
    Kernel::template Compute<kCareful>(s, LoadAs<kGradient>(d, gradient, i), planes, large);
  };
  constexpr bool kHasSum = requires { Kernel::kHasSum; };
  [[maybe_unused]] Moments moments;
  FloatVec largest = hn::Zero(d);
  FloatVec largest_sq = hn::Zero(d);
  for (size_t i = 0; i < PackedTurnElements(kFormat); i += 2 * lanes) {
    PlaneVecs<Kernel> low, high;
    compute(i, low);
    compute(i + lanes, high);
    PackMaster(low[0], high[0], record.weights + i, record.remainders + i);
    if constexpr (kFormat == StateFormat::k8Bit) {
      hn::Store(low[1], d, moments.exp_avg + i);
      hn::Store(high[1], d, moments.exp_avg + i + lanes);
      hn::Store(low[2], d, moments.exp_avg_sq + i);
      hn::Store(high[2], d, moments.exp_avg_sq + i + lanes);
      largest = hn::Max(largest, hn::Max(hn::Abs(low[1]), hn::Abs(high[1])));
      largest_sq = hn::Max(largest_sq, hn::Max(low[2], high[2]));
    } else {
      ForEachPlace<Kernel>([&](auto place) HWY_ATTR {
        if constexpr (place > 0 && kHasSum) {
          PackSums(low[place], high[place], u.sum, record.As<uint16_t>(place) + i);
        } else if (place > 0) {
          StorePairAs<DType::kBFloat16>(d, low[place], high[place], record.codes[place], i,
                                        /*stream=*/false);
        }
      });
    }
  }
  if (!kCareful && !hn::AllTrue(IntTag(), large)) return false;
  if constexpr (kFormat == StateFormat::k8Bit) {
    PackMoments(moments, largest, largest_sq, u, record);
  }
  return true;
}

// What goes out of the turn's weights.
template <DType kShard>
HWY_INLINE void StoreShard(const PackedPlaces& from, size_t elements, void* shard, bool stream) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < elements; i += 2 * lanes) {
    if constexpr (kShard == DType::kBFloat16) {
      StoreVector(hn::LoadU(HalvesTag(), from.weights + i), static_cast<uint16_t*>(shard) + i,
                  stream);
    } else {
      const auto master = [&](size_t at) HWY_ATTR {
        return UnpackMaster(from.weights + at, from.remainders + at);
      };
      StorePairAs<kShard>(d, master(i), master(i + lanes), shard, i, stream);
    }
  }
}

// One turn, of which the first `elements` are stored. `from`, gradient and shard have a whole one.
template <class Kernel, StateFormat kFormat, DType kGradient>
HWY_INLINE void UpdatePackedTurn(const PackedPlaces& from, const PackedPlaces& to, size_t elements,
                                 const void* gradient, void* shard, DType shard_dtype, bool stream,
                                 const typename Kernel::Scalars& s, const UpdateThresholds& u,
                                 RedoWriter* redo, int64_t& careful_turns) {
  constexpr size_t kElements = PackedTurnElements(kFormat);
  RedoTurn own;
  const PackedPlaces record =
      PlacesOfTurn(redo == nullptr ? own : redo->next(), kFormat, Kernel::kPlanes);
  const auto compute = [&]<bool kCareful>(std::bool_constant<kCareful>) HWY_ATTR {
    return ComputePackedTurn<Kernel, kFormat, kGradient, kCareful>(from, gradient, s, u, record);
  };
  if (careful_turns == 0 && !compute(std::false_type()))
    careful_turns = kCarefulElements / kElements;
  if (careful_turns > 0) {
    compute(std::true_type());
    --careful_turns;
  }
  if (redo != nullptr) redo->Record(static_cast<int64_t>(elements));
  CopyTurn(kFormat, Kernel::kPlanes, record, to, elements);
  if (shard == nullptr) return;
  switch (shard_dtype) {
    case DType::kBFloat16:
      return StoreShard<DType::kBFloat16>(record, kElements, shard, stream);
    case DType::kFloat16:
      return StoreShard<DType::kFloat16>(record, kElements, shard, stream);
    case DType::kFloat32:
      return StoreShard<DType::kFloat32>(record, kElements, shard, stream);
  }
}

// Less than a turn, from a padded copy.
template <class Kernel, StateFormat kFormat, DType kGradient>
HWY_NOINLINE void UpdatePackedTail(const PackedPlaces& from, const PackedPlaces& to,
                                   const void* gradient, void* shard, DType shard_dtype,
                                   size_t elements, const typename Kernel::Scalars& s,
                                   const UpdateThresholds& u, RedoWriter* redo) {
  RedoTurn copy = {};
  const PackedPlaces padded = PlacesOfTurn(copy, kFormat, Kernel::kPlanes);
  float padded_gradient[kPackedGroup] = {};
  alignas(64) float padded_shard[kPackedGroup];
  CopyTurn(kFormat, Kernel::kPlanes, from, padded, elements);
  std::memcpy(padded_gradient, gradient, elements * SizeBytes(kGradient));
  int64_t careful_turns = 0;
  UpdatePackedTurn<Kernel, kFormat, kGradient>(padded, to, elements, padded_gradient,
                                               shard == nullptr ? nullptr : padded_shard,
                                               shard_dtype, false, s, u, redo, careful_turns);
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
  fetch(gradient, ahead * SizeBytes(dtype), kElements * SizeBytes(dtype));
  fetch(places.weights, ahead * 2, kElements * 2);
  fetch(places.remainders, ahead * 2, kElements * 2);
  for (size_t place = 1; place < Kernel::kPlanes; ++place) {
    fetch(places.codes[place], ahead * CodeBytes(kFormat), kElements * CodeBytes(kFormat));
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
  const UpdateThresholds u(kFormat, run.rule.update_count);
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
    UpdatePackedTurn<Kernel, kFormat, kGradient>(from, to, kElements, gradient, shard, shard_dtype,
                                                 stream, s, u, redo, careful_turns);
    PrefetchTurn<Kernel, kFormat>(from, gradient, kGradient, kPrefetchAhead);
    from.Advance(kElements, kFormat, Kernel::kPlanes);
    to.Advance(kElements, kFormat, Kernel::kPlanes);
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
