// The codes of packed state (state_format.h), one element at a time: the specification. The mode of
// floating point does not show in them.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_CODES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_CODES_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cpu_optimizer_service/common/packed/state_format.h"
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

// ---- 8bit

// `u` of the codes, by an element's place in its group.
using Thresholds = std::array<float, kPackedGroup>;
// Of an update.
struct PackedThresholds {
  explicit PackedThresholds(int64_t update_count);
  Thresholds exp_avg;
  Thresholds exp_avg_sq;
};
// Of values from elsewhere: to nearest.
inline constexpr float kNearest = 0.5f;

inline constexpr float kExpAvgCodes = 127;
inline constexpr float kExpAvgSqCodes = 255;
// Else the largest element of a group would not be exact.
static_assert(kExpAvgCodes * (1 / kExpAvgCodes) == 1 && kExpAvgSqCodes * (1 / kExpAvgSqCodes) == 1);

// What values are multiplied by before they get their codes.
inline float FactorOfExpAvg(float scale) { return 1.0f / std::max(scale, 0x1p-126f); }
inline float FactorOfExpAvgSq(float scale) { return 1.0f / std::max(scale, 0x1p-63f); }

inline int8_t PackExpAvg(float m, float factor, float u) {
  const float y = std::copysign(std::sqrt(std::fabs(m) * factor) * kExpAvgCodes, m);
  return static_cast<int8_t>(static_cast<int>(y + 128.0f + u) - 128);
}
inline float UnpackExpAvg(int8_t code, float scale) {
  const float s = static_cast<float>(code) * (1 / kExpAvgCodes);
  return P(s * std::fabs(s) * scale);
}

inline uint8_t PackExpAvgSq(float v, float factor, float u) {
  const float z = std::sqrt(std::sqrt(v) * factor) * kExpAvgSqCodes;
  return static_cast<uint8_t>(std::clamp(static_cast<int>(z + u), v > 0 ? 1 : 0, 255));
}
inline float UnpackExpAvgSq(uint8_t code, float scale) {
  const float s = static_cast<float>(code) * (1 / kExpAvgSqCodes);
  const float r = s * s * scale;
  return P(r * r);
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PACKED_CODES_H_
