#include "cpu_optimizer_service/common/float_format.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

// A 16-bit format by the textbook: sign, exponent, mantissa.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);

  uint16_t infinity() const {
    return static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }
  double Value(uint16_t magnitude) const {
    const int exponent = magnitude >> mantissa_bits;
    const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
};

class FloatFormatTest : public testing::TestWithParam<Format> {};

TEST_P(FloatFormatTest, EveryValueReadsAsTheTextbookSaysAndWritesBackTheSame) {
  const Format& format = GetParam();
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t magnitude = bits & 0x7fff;
    const float value = format.to_float(static_cast<uint16_t>(bits));
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    if (magnitude > format.infinity()) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      const uint16_t back = format.from_float(value);
      ASSERT_GT(back & 0x7fff, format.infinity()) << bits;
      ASSERT_EQ(back & 0x8000, bits & 0x8000) << bits;
      continue;
    }
    const double expected = magnitude == format.infinity() ? kInfinity : format.Value(magnitude);
    ASSERT_EQ(static_cast<double>(std::fabs(value)), expected) << bits;
    ASSERT_EQ(format.from_float(value), bits);
  }
}

TEST_P(FloatFormatTest, RoundsToTheNearestAndTiesToEven) {
  const Format& format = GetParam();
  // The last turn is the tie between the greatest value and the power of two beyond it, which is
  // infinity.
  for (uint16_t low = 0; low < format.infinity(); ++low) {
    const uint16_t high = low + 1;
    const uint16_t even = low % 2 == 0 ? low : high;
    const float tie = static_cast<float>(format.Value(low) / 2 + format.Value(high) / 2);
    ASSERT_EQ(format.from_float(tie), even) << low;
    ASSERT_EQ(format.from_float(std::nextafter(tie, 0.0f)), low) << low;
    ASSERT_EQ(format.from_float(std::nextafter(tie, kInfinity)), high) << low;
    ASSERT_EQ(format.from_float(-tie), even | 0x8000) << low;
  }
}

TEST_P(FloatFormatTest, KeepsANanWhosePayloadIsInTheDroppedBits) {
  const Format& format = GetParam();
  for (const uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7fc00000u}) {
    const uint16_t rounded = format.from_float(std::bit_cast<float>(bits));
    EXPECT_GT(rounded & 0x7fff, format.infinity()) << bits;
    EXPECT_EQ(rounded >> 15, bits >> 31) << bits;
  }
}

INSTANTIATE_TEST_SUITE_P(BFloat16, FloatFormatTest,
                         testing::Values(Format{8, 7, BFloat16ToFloat, FloatToBFloat16}));
INSTANTIATE_TEST_SUITE_P(Float16, FloatFormatTest,
                         testing::Values(Format{5, 10, Float16ToFloat, FloatToFloat16}));

TEST(Float16, OverflowsFromHalfAnUlpBeyondItsGreatestValue) {
  EXPECT_EQ(FloatToFloat16(65504.0f), 0x7bff);
  EXPECT_EQ(FloatToFloat16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(FloatToFloat16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToFloat16(-65520.0f), 0xfc00);
  EXPECT_EQ(FloatToFloat16(kInfinity), 0x7c00);
}

TEST(Float16, UnderflowsAtHalfItsLeastValue) {
  EXPECT_EQ(FloatToFloat16(0x1p-25f), 0x0000);
  EXPECT_EQ(FloatToFloat16(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_EQ(FloatToFloat16(-0x1p-126f), 0x8000);
}

TEST(BFloat16, OverflowsFromHalfAnUlpBeyondItsGreatestValue) {
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x7f7f7fffu)), 0x7f7f);
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x7f7f8000u)), 0x7f80);
}

TEST(BFloat16, KeepsDenormals) {
  EXPECT_EQ(FloatToBFloat16(std::bit_cast<float>(0x00010000u)), 0x0001);
  EXPECT_EQ(Bits(BFloat16ToFloat(0x8001)), 0x80010000u);
}

TEST(Element, IsStoredAndLoadedAtAnyAddress) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    std::array<unsigned char, 16> bytes;
    bytes.fill(0xa5);
    StoreElement(bytes.data() + 1, dtype, 1, -1.5f);
    EXPECT_EQ(LoadElement(bytes.data() + 1, dtype, 1), -1.5f) << Name(dtype);
    const auto size = static_cast<size_t>(SizeBytes(dtype));
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (i < 1 + size || i >= 1 + 2 * size) EXPECT_EQ(bytes[i], 0xa5) << i;
    }
  }
}

}  // namespace
}  // namespace ballast
