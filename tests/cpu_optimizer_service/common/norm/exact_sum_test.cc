#include "cpu_optimizer_service/common/norm/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace ballast {
namespace {

double SumOf(const std::vector<double>& values) {
  ExactSum sum;
  sum.Add(values);
  return sum.Rounded();
}

TEST(ExactSum, IsTheRoundedSumOfIntegers) {
  std::mt19937_64 random(7);
  for (int turn = 0; turn < 10000; ++turn) {
    // Integers of up to 120 bits, and so are their sums; the conversion rounds to nearest.
    const int lowest = static_cast<int>(random() % 400) - 298;
    const int spread = 1 + static_cast<int>(random() % 67);
    std::vector<double> values;
    unsigned __int128 expected = 0;
    for (uint64_t i = 0; i <= random() % 20; ++i) {
      const uint64_t mantissa = random() >> (11 + random() % 50);
      const int shift = static_cast<int>(random() % spread);
      values.push_back(std::ldexp(static_cast<double>(mantissa), lowest + shift));
      expected += static_cast<unsigned __int128>(mantissa) << shift;
    }
    ASSERT_EQ(SumOf(values), std::ldexp(static_cast<double>(expected), lowest));
  }
}

TEST(ExactSum, HasNoOrderAndNoParts) {
  std::mt19937_64 random(7);
  std::vector<double> values;
  for (int i = 0; i < 3000; ++i) {
    values.push_back(std::ldexp(static_cast<double>(random() % (1 << 24)),
                                static_cast<int>(random() % 530) - 298));
  }
  ExactSum expected;
  expected.Add(values);
  for (int turn = 0; turn < 20; ++turn) {
    std::shuffle(values.begin(), values.end(), random);
    ExactSum parts;
    for (absl::Span<const double> left = values; !left.empty();) {
      ExactSum part;
      const size_t size = std::min<size_t>(left.size(), 1 + random() % 500);
      part.Add(left.first(size));
      left.remove_prefix(size);
      parts.Add(ExactSum::FromWords(part.words()));
    }
    ASSERT_EQ(parts.words(), expected.words());
  }
}

TEST(ExactSum, RoundsTiesToEven) {
  EXPECT_EQ(SumOf({1.0, 0x1p-53}), 1.0);
  EXPECT_EQ(SumOf({1.0 + 0x1p-52, 0x1p-53}), 1.0 + 0x1p-51);
  EXPECT_EQ(SumOf({1.0, 0x1p-53, 0x1p-298}), 1.0 + 0x1p-52) << "the last bit of all decides";
  EXPECT_EQ(SumOf({2.0 - 0x1p-52, 0x1p-53}), 2.0) << "the carry reaches the exponent";
  EXPECT_EQ(SumOf({}), 0.0);
  EXPECT_EQ(SumOf({0.0, 0x1p-298, 0.0}), 0x1p-298);
}

TEST(ExactSum, CarriesFromItsLowestBitToItsHighest) {
  ExactSum::Words words = {};
  std::fill_n(words.begin(), 9, ~uint64_t{0});
  ExactSum sum = ExactSum::FromWords(words);
  sum.Add(0x1p-298);
  EXPECT_EQ(sum.words(), (ExactSum::Words{0, 0, 0, 0, 0, 0, 0, 0, 0, 1}));
}

TEST(ExactSum, HoldsAsManyOfTheLargestAsThereCanBe) {
  const double largest =
      256 * std::pow(double{std::numeric_limits<float>::max()}, 2);  // A block's sum.
  ExactSum sum;
  sum.Add(largest);
  for (int i = 0; i < 34; ++i) sum.Add(ExactSum(sum));
  EXPECT_EQ(sum.Rounded(), largest * 0x1p34);
}

TEST(ExactSum, IsAsLittleFiniteAsItsValues) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(SumOf({1.0, kInf, 2.0, kInf}), kInf);
  EXPECT_TRUE(std::isnan(SumOf({kInf, kNan, 1.0})));
  EXPECT_TRUE(std::isnan(SumOf({1.0, -kNan})));
  for (const double value : {kInf, kNan}) {
    ExactSum sum, other;
    other.Add(value);
    for (int i = 0; i < 3; ++i) sum.Add(other);
    EXPECT_FALSE(std::isfinite(sum.Rounded()));
    EXPECT_EQ(std::isnan(sum.Rounded()), std::isnan(value));
  }
}

}  // namespace
}  // namespace ballast
