// The formats of a group's state, and their codes, one element at a time: the specification. The values
// are the same planes in each format; what is stored of them differs:
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
//   sum         bf16: rounded by u, see below                       2
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
//
// Adagrad's sum only grows, and in bf16, rounded to nearest, it would stop. So an update stores
// (bits(sum) + u) >> 16, with u = fraction(number of the update * golden ratio) * 2^16, the same for all elements.
// Such fractions are spread more evenly than random numbers (H. Weyl, 1916). With gradients in every update the sum
// stays within 2% of fp32's, where a random u gives 6% of scatter.
//
// The mode of floating point does not show in any of it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_CODES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_CODES_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "cpu_optimizer_service/common/plane.h"
#include "cpu_optimizer_service/common/rules/arithmetic.h"

namespace ballast {

// ---- master

inline uint16_t PackWeight(float master) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(master) + 0x8000u) >> 16);
}
inline uint16_t PackRemainder(float master) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(master));
}
inline float UnpackMaster(uint16_t weight, uint16_t remainder) {
  const auto low = static_cast<int16_t>(remainder);
  return std::bit_cast<float>((uint32_t{weight} << 16) + static_cast<uint32_t>(int32_t{low}));
}

// ---- bf16

// `u` of an update's sums.
inline uint32_t SumThreshold(int64_t update_count) {
  return static_cast<uint32_t>(update_count) * 0x9e3779b9u >> 16;
}
// NaN stays NaN.
inline uint16_t PackSum(float sum, uint32_t u) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(sum) + (std::isnan(sum) ? 0 : u)) >> 16);
}

// ---- 8bit

// `u` of the codes, by an element's place in its group.
using Thresholds = std::array<int32_t, kPackedGroup>;
// Of an update.
struct PackedThresholds {
  explicit PackedThresholds(int64_t update_count);
  Thresholds exp_avg;
  Thresholds exp_avg_sq;
};
// Of values from elsewhere: to nearest.
inline constexpr float kNearest = 0.5f;

inline constexpr int kCodeShift = 20;

// The codes of one plane.
struct CodeTable {
  // F of the largest code.
  static constexpr float Last(float c, int32_t codes) {
    return std::bit_cast<float>(std::bit_cast<int32_t>(c) + (codes << kCodeShift));
  }
  constexpr CodeTable(float c, int32_t codes)
      : c(c), c_bits(std::bit_cast<int32_t>(c)), d(Last(c, codes) - c), inverse_d(1 / d) {}

  int32_t Code(float x, float factor, int32_t u) const {
    const float y = std::fabs(x) * factor * d + c;
    return (std::bit_cast<int32_t>(y) - c_bits + u) >> kCodeShift;
  }
  float Value(int32_t code, float scale) const {
    const auto f = std::bit_cast<float>(c_bits + (code << kCodeShift));
    return (f - c) * inverse_d * scale;
  }

  float c;
  int32_t c_bits;
  float d;
  float inverse_d;
};
inline constexpr CodeTable kExpAvgCodes(0x1p-15f, 127);
inline constexpr CodeTable kExpAvgSqCodes(0x1p-31f, 255);
// Else the largest element of a group would not be exact.
static_assert(kExpAvgCodes.d * kExpAvgCodes.inverse_d == 1);
static_assert(kExpAvgSqCodes.d * kExpAvgSqCodes.inverse_d == 1);

// What the elements of a group are multiplied by before they get their codes.
inline float FactorOf(float scale) { return 1.0f / std::max(scale, 0x1p-126f); }

inline int8_t PackExpAvg(float m, float factor, int32_t u) {
  const int32_t code = kExpAvgCodes.Code(m, factor, u);
  return static_cast<int8_t>(std::signbit(m) ? -code : code);
}
inline float UnpackExpAvg(int8_t code, float scale) {
  const float value = kExpAvgCodes.Value(std::abs(int32_t{code}), scale);
  return P(code < 0 ? -value : value);
}

inline uint8_t PackExpAvgSq(float v, float factor, int32_t u) {
  return static_cast<uint8_t>(std::max(kExpAvgSqCodes.Code(v, factor, u), v > 0 ? 1 : 0));
}
inline float UnpackExpAvgSq(uint8_t code, float scale) {
  return P(kExpAvgSqCodes.Value(code, scale));
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_CODES_H_
