#include "cpu_optimizer_service/kernels/crc32.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <random>
#include <string>
#include <vector>

#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

uint32_t OfZlib(uint32_t crc, absl::Span<const std::byte> bytes) {
  // zlib takes a null pointer for the wish to begin.
  if (bytes.empty()) return crc;
  return static_cast<uint32_t>(
      crc32(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()));
}

std::vector<std::byte> RandomBytes(size_t count) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(Crc32, OfTheDigitsIsTheOneThatTheStandardNames) {
  const std::string digits = "123456789";
  EXPECT_EQ(Crc32(0, absl::MakeConstSpan(reinterpret_cast<const std::byte*>(digits.data()), 9)),
            0xCBF43926);
  EXPECT_EQ(Crc32(0, {}), 0u);
}

TEST(Crc32, EqualsZlibsAtEachSizeAndAlignmentOnEachInstructionSet) {
  const std::vector<std::byte> bytes = RandomBytes(400);
  for (const std::string& target : SupportedKernelTargets()) {
    ASSERT_TRUE(SetKernelTargetForTest(target));
    for (size_t begin = 0; begin < 17; ++begin) {
      for (size_t size = 0; begin + size <= bytes.size(); ++size) {
        const auto piece = absl::MakeConstSpan(bytes).subspan(begin, size);
        ASSERT_EQ(Crc32(0, piece), OfZlib(0, piece)) << target << " " << begin << " " << size;
      }
    }
  }
  ASSERT_TRUE(SetKernelTargetForTest(""));
}

TEST(Crc32, GoesOnFromTheBytesBefore) {
  const std::vector<std::byte> bytes = RandomBytes(1000);
  const auto all = absl::MakeConstSpan(bytes);
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    ASSERT_EQ(Crc32(Crc32(0, all.first(cut)), all.subspan(cut)), OfZlib(0, all)) << cut;
  }
}

TEST(Crc32, EveryFlippedBitShows) {
  std::vector<std::byte> bytes = RandomBytes(300);
  const uint32_t right = Crc32(0, bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    ASSERT_NE(Crc32(0, bytes), right) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
}

}  // namespace
}  // namespace ballast
