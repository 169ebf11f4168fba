// Vectors of fp32 from and to arrays of any format, by the integer arithmetic of
// common/float_format.h. Included once per instruction set.
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_CONVERSION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_CONVERSION_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_CONVERSION_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_CONVERSION_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "cpu_optimizer_service/common/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class DF>
HWY_INLINE hn::Vec<DF> Float16BitsToFloat(DF df, hn::Vec<hn::RebindToUnsigned<DF>> bits) {
  const hn::RebindToUnsigned<DF> du;
  const hn::RebindToSigned<DF> di;
  const auto rebias = hn::Set(du, 112u << 23);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffu));
  const auto sign = hn::ShiftLeft<31>(hn::ShiftRight<15>(bits));

  const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
  // An integer of up to 10 bits times a power of two: exact, and normal unless zero.
  const auto denormal = hn::BitCast(
      du, hn::Mul(hn::ConvertTo(df, hn::BitCast(di, magnitude)), hn::Set(df, 0x1p-24f)));
  const auto quiet =
      hn::IfThenElseZero(hn::Gt(magnitude, hn::Set(du, 0x7c00u)), hn::Set(du, 0x00400000u));
  const auto not_finite = hn::Or(hn::Add(normal, rebias), quiet);

  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x400u)), denormal, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7bffu)), not_finite, result);
  return hn::BitCast(df, hn::Or(result, sign));
}

template <class DF>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> FloatToFloat16Bits(DF df, hn::Vec<DF> value) {
  const hn::RebindToUnsigned<DF> du;
  const auto bits = hn::BitCast(du, value);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto sign = hn::ShiftLeft<15>(hn::ShiftRight<31>(bits));

  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(du, 0xfffu)), odd);
  const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23)));
  // Beside 0.5, whose last bit is worth 2^-24, the addition itself rounds to an fp16 denormal. What
  // is denormal in fp32 rounds to zero, flushed or not.
  const auto half = hn::Set(df, 0.5f);
  const auto denormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(df, magnitude), half)), hn::BitCast(du, half));
  const auto not_finite = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7f800000u)),
                                         hn::Set(du, 0x7e00u), hn::Set(du, 0x7c00u));

  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x38800000u)), denormal, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477fefffu)), not_finite, result);
  return hn::Or(result, sign);
}

// In the upper half of each lane.
template <class DF>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> FloatToBFloat16UpperBits(DF df, hn::Vec<DF> value) {
  const hn::RebindToUnsigned<DF> du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
  return hn::IfThenElse(is_nan, quiet, rounded);
}

// The upper 16 bits of the lanes of `low`, then of `high`.
template <class V32>
HWY_INLINE auto UpperHalves(V32 low, V32 high) {
  const hn::Repartition<uint16_t, hn::DFromV<V32>> d16;
  return hn::ConcatOdd(d16, hn::BitCast(d16, high), hn::BitCast(d16, low));
}
// The lower ones.
template <class V32>
HWY_INLINE auto LowerHalves(V32 low, V32 high) {
  const hn::Repartition<uint16_t, hn::DFromV<V32>> d16;
  return hn::ConcatEven(d16, hn::BitCast(d16, high), hn::BitCast(d16, low));
}

// Elements [index, index + Lanes(df)) of the array at `data`.
template <DType kDType, class DF>
HWY_INLINE hn::Vec<DF> LoadAs(DF df, const void* data, size_t index) {
  if constexpr (kDType == DType::kFloat32) {
    return hn::LoadU(df, static_cast<const float*>(data) + index);
  } else {
    const hn::RebindToUnsigned<DF> du;
    const hn::Rebind<uint16_t, DF> d16;
    const auto bits = hn::PromoteTo(du, hn::LoadU(d16, static_cast<const uint16_t*>(data) + index));
    if constexpr (kDType == DType::kBFloat16) return hn::BitCast(df, hn::ShiftLeft<16>(bits));
    return Float16BitsToFloat(df, bits);
  }
}

// Streaming goes round the caches, and needs `to` aligned to a whole vector.
template <class V>
HWY_INLINE void StoreVector(V value, hn::TFromV<V>* to, bool stream) {
  const hn::DFromV<V> d;
  if (stream) {
    hn::Stream(value, d, to);
  } else {
    hn::StoreU(value, d, to);
  }
}

// Stores `low` and `high` as 2 * Lanes(df) elements from `index` of the array at `data`.
template <DType kDType, class DF>
HWY_INLINE void StorePairAs(DF df, hn::Vec<DF> low, hn::Vec<DF> high, void* data, size_t index,
                            bool stream) {
  if constexpr (kDType == DType::kFloat32) {
    float* const to = static_cast<float*>(data) + index;
    StoreVector(low, to, stream);
    StoreVector(high, to + hn::Lanes(df), stream);
  } else {
    uint16_t* const to = static_cast<uint16_t*>(data) + index;
    if constexpr (kDType == DType::kBFloat16) {
      StoreVector(
          UpperHalves(FloatToBFloat16UpperBits(df, low), FloatToBFloat16UpperBits(df, high)), to,
          stream);
    } else {
      StoreVector(LowerHalves(FloatToFloat16Bits(df, low), FloatToFloat16Bits(df, high)), to,
                  stream);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_CONVERSION_INL_H_
