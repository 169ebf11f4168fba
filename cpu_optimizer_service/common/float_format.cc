#include "cpu_optimizer_service/common/float_format.h"

#include <bit>
#include <cstring>

namespace ballast {

// bf16 is the upper half of an fp32: the same sign and exponent, and 7 of 23 bits of the mantissa.
float BFloat16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // A NaN is cut, not rounded: a carry could make infinity or zero of it. The bit that is set makes
  // it quiet, and keeps it a NaN where only lower bits of the mantissa were set.
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  // Half an ulp less one, plus the lowest kept bit: carries exactly when rounding to even goes up.
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float Float16ToFloat(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  // The largest exponent means infinity, or NaN if the mantissa is not zero.
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  // 112 is the difference of the two biases, 127 - 15.
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (mantissa == 0) return std::bit_cast<float>(sign);
  // A denormal of value mantissa * 2^-24 is a normal fp32: shift its leading bit into place.
  const int shift = std::countl_zero(mantissa) - 21;
  const uint32_t normal_mantissa = (mantissa << shift) & 0x3ffu;
  // 113 is the fp32 exponent field of 2^-14; each place of the shift halves the value.
  return std::bit_cast<float>(sign | (static_cast<uint32_t>(113 - shift) << 23) |
                              (normal_mantissa << 13));
}

uint16_t FloatToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // Rounds to 2^16 or beyond.
  if (magnitude < 0x38800000u) {                        // Below 2^-14: an fp16 denormal, or zero.
    if (magnitude < 0x33000000u) return sign;           // Below half of the least denormal.
    const uint32_t exponent = magnitude >> 23;
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126 - exponent;  // 14 to 24
    // `kept` counts units of 2^-24, the least denormal. Rounded up from the largest denormal it has
    // the bits of 2^-14, the least normal number, which is right.
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    const uint32_t half = 1u << (shift - 1);
    return static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
  }
  // As in FloatToBFloat16, with 13 bits that go. 0x38000000 is the difference of the biases, 112,
  // in the place of the exponent.
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float LoadElement(const void* data, DType dtype, int64_t index) {
  const auto* bytes = static_cast<const std::byte*>(data) + index * SizeBytes(dtype);
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return dtype == DType::kBFloat16 ? BFloat16ToFloat(bits) : Float16ToFloat(bits);
}

void StoreElement(void* data, DType dtype, int64_t index, float value) {
  auto* bytes = static_cast<std::byte*>(data) + index * SizeBytes(dtype);
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == DType::kBFloat16 ? FloatToBFloat16(value) : FloatToFloat16(value);
  std::memcpy(bytes, &bits, sizeof(bits));
}

}  // namespace ballast
