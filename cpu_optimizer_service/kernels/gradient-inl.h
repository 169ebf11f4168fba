// Sums of squares per block, sums of gradients and conversions, a vector at a time. Included once
// per instruction set.
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENT_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENT_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENT_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/kernels/conversion-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Added pairwise: l and l + 8, l and l + 4, ...
HWY_INLINE double AddLanes(double* lanes, size_t count) {
  for (size_t half = count / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// The order of common/gradient_norm.h: lane l of 16 takes the elements l, l + 16, ...; a vector
// holds neighbouring lanes. The square of an fp32 value is exact in double, so a fused multiply-add
// rounds exactly as the addition after it would.
template <DType kDType>
HWY_INLINE double BlockSumOfSquares(const void* gradient, size_t begin) {
  constexpr size_t kLanes = 16;
  const hn::CappedTag<double, kLanes> dd;
  const hn::Rebind<float, decltype(dd)> df;
  double lanes[kLanes];
  for (size_t lane = 0; lane < kLanes; lane += hn::Lanes(dd)) {
    auto sum = hn::Zero(dd);
    for (size_t i = lane; i < kBlockElements; i += kLanes) {
      const auto value = hn::PromoteTo(dd, LoadAs<kDType>(df, gradient, begin + i));
      sum = hn::MulAdd(value, value, sum);
    }
    hn::StoreU(sum, dd, lanes + lane);
  }
  return AddLanes(lanes, kLanes);
}

// The same, a quarter faster: of a 32-bit word that holds two elements either half becomes an fp32
// value in one operation, so that a vector holds the even lanes, or the odd ones.
template <>
HWY_INLINE double BlockSumOfSquares<DType::kBFloat16>(const void* gradient, size_t begin) {
  constexpr size_t kPairLanes = 8;
  constexpr size_t kBlockPairs = kBlockElements / 2;
  const hn::CappedTag<double, kPairLanes> dd;
  const hn::Rebind<float, decltype(dd)> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Repartition<uint16_t, decltype(du)> d16;
  const auto* bits = static_cast<const uint16_t*>(gradient) + begin;
  double even[kPairLanes];
  double odd[kPairLanes];
  for (size_t lane = 0; lane < kPairLanes; lane += hn::Lanes(dd)) {
    auto even_sum = hn::Zero(dd);
    auto odd_sum = hn::Zero(dd);
    for (size_t pair = lane; pair < kBlockPairs; pair += kPairLanes) {
      const auto words = hn::BitCast(du, hn::LoadU(d16, bits + 2 * pair));
      const auto low = hn::PromoteTo(dd, hn::BitCast(df, hn::ShiftLeft<16>(words)));
      const auto high =
          hn::PromoteTo(dd, hn::BitCast(df, hn::And(words, hn::Set(du, 0xffff0000u))));
      even_sum = hn::MulAdd(low, low, even_sum);
      odd_sum = hn::MulAdd(high, high, odd_sum);
    }
    hn::StoreU(even_sum, dd, even + lane);
    hn::StoreU(odd_sum, dd, odd + lane);
  }
  return AddLanes(even, kPairLanes) + AddLanes(odd, kPairLanes);
}

template <DType kDType>
void BlockSumsAs(const void* gradient, double* sums, size_t blocks) {
  constexpr size_t kBlockBytes = kBlockElements * SizeBytes(kDType);
  constexpr size_t kPrefetchAhead = 8192;
  constexpr size_t kLineBytes = 64;
  for (size_t b = 0; b < blocks; ++b) {
    const char* ahead = static_cast<const char*>(gradient) + b * kBlockBytes + kPrefetchAhead;
    for (size_t byte = 0; byte < kBlockBytes; byte += kLineBytes) hwy::Prefetch(ahead + byte);
    sums[b] = BlockSumOfSquares<kDType>(gradient, b * kBlockElements);
  }
}

// to[i] = first[i], or first[i] + second[i], for a whole number of turns of two vectors. `to` may
// be `first`.
template <bool kAdd, DType kFirst, DType kSecond, DType kTo>
HWY_NOINLINE void MapTurns(const void* first, const void* second, void* to, size_t elements) {
  const hn::ScalableTag<float> df;
  const size_t lanes = hn::Lanes(df);
  for (size_t i = 0; i < elements; i += 2 * lanes) {
    auto low = LoadAs<kFirst>(df, first, i);
    auto high = LoadAs<kFirst>(df, first, i + lanes);
    if constexpr (kAdd) {
      low = hn::Add(low, LoadAs<kSecond>(df, second, i));
      high = hn::Add(high, LoadAs<kSecond>(df, second, i + lanes));
    }
    StorePairAs<kTo>(df, low, high, to, i, /*stream=*/false);
  }
}

// Whole turns, then a tail in a padded copy.
template <bool kAdd, DType kFirst, DType kSecond, DType kTo>
void Map(const void* first, const void* second, void* to, size_t elements) {
  const hn::ScalableTag<float> df;
  constexpr size_t kMaxTurn = 2 * hn::MaxLanes(df);
  const size_t turn = 2 * hn::Lanes(df);
  const size_t whole = elements / turn * turn;
  const size_t tail = elements - whole;
  MapTurns<kAdd, kFirst, kSecond, kTo>(first, second, to, whole);
  if (tail == 0) return;

  float padded_first[kMaxTurn] = {};
  float padded_second[kMaxTurn] = {};
  float padded_to[kMaxTurn];
  const auto at_tail = [whole](const void* data, DType dtype) {
    return static_cast<const char*>(data) + whole * SizeBytes(dtype);
  };
  std::memcpy(padded_first, at_tail(first, kFirst), tail * SizeBytes(kFirst));
  if constexpr (kAdd) {
    std::memcpy(padded_second, at_tail(second, kSecond), tail * SizeBytes(kSecond));
  }
  MapTurns<kAdd, kFirst, kSecond, kTo>(padded_first, padded_second, padded_to, turn);
  std::memcpy(static_cast<char*>(to) + whole * SizeBytes(kTo), padded_to, tail * SizeBytes(kTo));
}

// The formats are chosen here, above every loop.

HWY_NOINLINE void BlockSums(const void* gradient, DType dtype, double* sums, size_t blocks) {
  switch (dtype) {
    case DType::kBFloat16:
      return BlockSumsAs<DType::kBFloat16>(gradient, sums, blocks);
    case DType::kFloat16:
      return BlockSumsAs<DType::kFloat16>(gradient, sums, blocks);
    case DType::kFloat32:
      return BlockSumsAs<DType::kFloat32>(gradient, sums, blocks);
  }
}

HWY_NOINLINE void Accumulate(float* accumulator, const void* gradient, DType dtype,
                             size_t elements) {
  constexpr DType kFloat = DType::kFloat32;
  switch (dtype) {
    case DType::kBFloat16:
      return Map<true, kFloat, DType::kBFloat16, kFloat>(accumulator, gradient, accumulator,
                                                         elements);
    case DType::kFloat16:
      return Map<true, kFloat, DType::kFloat16, kFloat>(accumulator, gradient, accumulator,
                                                        elements);
    case DType::kFloat32:
      return Map<true, kFloat, kFloat, kFloat>(accumulator, gradient, accumulator, elements);
  }
}

HWY_NOINLINE void Sum(float* accumulator, const void* first, const void* second, DType dtype,
                      size_t elements) {
  constexpr DType kBFloat16 = DType::kBFloat16;
  constexpr DType kFloat16 = DType::kFloat16;
  constexpr DType kFloat = DType::kFloat32;
  switch (dtype) {
    case kBFloat16:
      return Map<true, kBFloat16, kBFloat16, kFloat>(first, second, accumulator, elements);
    case kFloat16:
      return Map<true, kFloat16, kFloat16, kFloat>(first, second, accumulator, elements);
    case kFloat:
      return Map<true, kFloat, kFloat, kFloat>(first, second, accumulator, elements);
  }
}

HWY_NOINLINE void FromFloat(const float* from, void* to, DType to_dtype, size_t elements) {
  constexpr DType kFloat = DType::kFloat32;
  switch (to_dtype) {
    case DType::kBFloat16:
      return Map<false, kFloat, kFloat, DType::kBFloat16>(from, nullptr, to, elements);
    case DType::kFloat16:
      return Map<false, kFloat, kFloat, DType::kFloat16>(from, nullptr, to, elements);
    case DType::kFloat32:
      return Map<false, kFloat, kFloat, kFloat>(from, nullptr, to, elements);
  }
}

HWY_NOINLINE void ToFloat(const void* from, DType from_dtype, float* to, size_t elements) {
  constexpr DType kFloat = DType::kFloat32;
  switch (from_dtype) {
    case DType::kBFloat16:
      return Map<false, DType::kBFloat16, kFloat, kFloat>(from, nullptr, to, elements);
    case DType::kFloat16:
      return Map<false, DType::kFloat16, kFloat, kFloat>(from, nullptr, to, elements);
    case DType::kFloat32:
      return Map<false, kFloat, kFloat, kFloat>(from, nullptr, to, elements);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENT_INL_H_
