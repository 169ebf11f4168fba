#include "cpu_optimizer_service/common/system/checked_word.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ballast {
namespace {

// All words with one, two or three bits.
std::vector<uint64_t> FewBits() {
  std::vector<uint64_t> few;
  for (int a = 0; a < 64; ++a) {
    for (int b = 0; b <= a; ++b) {
      for (int c = 0; c <= b; ++c) {
        few.push_back(uint64_t{1} << a | uint64_t{1} << b | uint64_t{1} << c);
      }
    }
  }
  return few;
}

TEST(CheckedWord, IsSeenToBeAnotherWhereUpToThreeBitsAreFlipped) {
  for (const uint64_t value : {uint64_t{0}, uint64_t{0x123456789abcd}, kCheckedValueMask}) {
    for (const uint32_t which : {0u, 1u, 77u, 0xffffffffu}) {
      const uint64_t word = CheckedWord(value, which);
      ASSERT_EQ(ValueOf(word, which), value);
      for (const uint64_t flips : FewBits()) {
        ASSERT_EQ(ValueOf(word ^ flips, which), std::nullopt) << flips;
      }
    }
  }
}

TEST(CheckedWord, IsSeenToBeInAnothersPlace) {
  for (uint32_t which = 0; which < 256; ++which) {
    for (uint32_t other = 0; other < 256; ++other) {
      EXPECT_EQ(ValueOf(CheckedWord(5, which), other).has_value(), which == other);
    }
  }
  for (const uint64_t flips : FewBits()) {
    const auto other = static_cast<uint32_t>(flips);
    if (other == flips) EXPECT_EQ(ValueOf(CheckedWord(5, 7), 7 ^ other), std::nullopt) << flips;
  }
}

TEST(CheckedWord, OfZeroedMemoryIsZero) { EXPECT_EQ(ValueOf(0), 0u); }

}  // namespace
}  // namespace ballast
