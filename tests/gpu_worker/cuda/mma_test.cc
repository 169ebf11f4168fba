#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/gpu_worker/cuda/kernel_test.h"
#include "tests/gpu_worker/cuda/mma_test_kernels.h"

namespace ballast::worker::cuda {
namespace {

using testing::Each;
using testing::ElementsAreArray;

class Mma : public KernelTest {};

// Small whole numbers, so that every sum is exact in any order.
std::vector<BFloat16Bits> RandomWholeNumbers(size_t count, uint64_t seed) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(RandomBits(seed, 0, i) % 31) - 15;
  }
  return ToBFloat16(values);
}

TEST_F(Mma, MultipliesByTheWrittenLayouts) {
  const auto a = RandomWholeNumbers(16 * 16, 1);
  const auto b = RandomWholeNumbers(16 * 8, 2);
  std::vector<float> expected(16 * 8);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<float>(i);
  const auto sum = Upload(expected);
  Run(MultiplyTile(stream(), Upload(a).data(), Upload(b).data(), sum.data()));
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      for (int k = 0; k < 16; ++k) {
        expected[row * 8 + column] +=
            BFloat16ToFloat(a[row * 16 + k]) * BFloat16ToFloat(b[k * 8 + column]);
      }
    }
  }
  EXPECT_EQ(Download(sum), expected);
}

// Element [row][column] of matrix i in the test's input is its place.
std::vector<BFloat16Bits> Places() {
  std::vector<BFloat16Bits> places(4 * 8 * 8);
  for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<BFloat16Bits>(i);
  return places;
}

TEST_F(Mma, LoadsMatricesByTheWrittenLayout) {
  const auto registers = Poisoned<uint32_t>(32 * 4);
  Run(LoadTiles(stream(), Upload(Places()).data(), /*transposed=*/false, registers.data()));
  std::vector<uint32_t> expected;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t place = i * 64 + lane / 4 * 8 + lane % 4 * 2;
      expected.push_back(place | (place + 1) << 16);
    }
  }
  EXPECT_EQ(Download(registers), expected);
}

TEST_F(Mma, LoadsTransposedMatricesByTheWrittenLayout) {
  const auto registers = Poisoned<uint32_t>(32 * 4);
  Run(LoadTiles(stream(), Upload(Places()).data(), /*transposed=*/true, registers.data()));
  std::vector<uint32_t> expected;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t place = i * 64 + lane % 4 * 2 * 8 + lane / 4;
      expected.push_back(place | (place + 8) << 16);
    }
  }
  EXPECT_EQ(Download(registers), expected);
}

TEST_F(Mma, CopiesGroupAfterGroupAndZeroesWhatIsAbsent) {
  std::vector<std::byte> from(kCopiedBytes);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(1 + i % 255);
  constexpr uint32_t kPresent = 0xa5f00f3cu;
  std::vector<std::byte> expected = from;
  for (int lane = 0; lane < 32; ++lane) {
    if ((kPresent >> lane & 1) == 0) std::fill_n(expected.begin() + 16 * lane, 16, std::byte{0});
  }

  const auto first = Poisoned<std::byte>(kCopiedBytes);
  const auto both = Poisoned<std::byte>(kCopiedBytes);
  Run(CopyThroughShared(stream(), Upload(from).data(), kPresent, first.data(), both.data()));
  EXPECT_EQ(Download(both), expected);
  std::vector<std::byte> after_first = Download(first);
  EXPECT_THAT(std::vector<std::byte>(after_first.begin() + 32 * 16, after_first.end()),
              Each(std::byte{0x55}));
  after_first.resize(32 * 16);
  expected.resize(32 * 16);
  EXPECT_THAT(after_first, ElementsAreArray(expected));
}

// With ties of both parities, what rounds up to infinity, denormals, and numbers of all sizes.
std::vector<float> ValuesOfEveryKind() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {0.0f,    -0.0f,          1.00390625f, 1.01171875f, -1.00390625f,
                               3.4e38f, 3.3961775e38f,  kInfinity,   -kInfinity,  1e-45f,
                               -1e-40f, 1.1754942e-38f, 1e-38f,      65280.5f};
  for (uint64_t i = 0; values.size() < 1000; ++i) {
    const auto bits = static_cast<uint32_t>(RandomBits(3, 0, i));
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    if (!std::isnan(value)) values.push_back(value);
  }
  return values;
}

TEST_F(Mma, PacksRoundedPairs) {
  const std::vector<float> low = ValuesOfEveryKind();
  const std::vector<float> high(low.rbegin(), low.rend());
  const auto packed = Poisoned<uint32_t>(low.size());
  const auto power = Poisoned<float>(low.size());
  Run(PackAndExp2(stream(), static_cast<int>(low.size()), Upload(low).data(), Upload(high).data(),
                  packed.data(), power.data()));
  std::vector<uint32_t> expected;
  for (size_t i = 0; i < low.size(); ++i) {
    expected.push_back(FloatToBFloat16(low[i]) | uint32_t{FloatToBFloat16(high[i])} << 16);
  }
  EXPECT_EQ(Download(packed), expected);
}

TEST_F(Mma, PacksNaNsAsNaNs) {
  const std::vector<float> nan = {std::numeric_limits<float>::quiet_NaN()};
  const auto packed = Poisoned<uint32_t>(1);
  const auto power = Poisoned<float>(1);
  Run(PackAndExp2(stream(), 1, Upload(nan).data(), Upload(std::vector<float>{1.0f}).data(),
                  packed.data(), power.data()));
  const uint32_t bits = Download(packed)[0];
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(static_cast<uint16_t>(bits)))) << bits;
  EXPECT_EQ(bits >> 16, FloatToBFloat16(1.0f));
  EXPECT_TRUE(std::isnan(Download(power)[0]));
}

TEST_F(Mma, RaisesTwoToAPower) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> x = {0.0f, 1.0f, -1.0f, 127.0f, -126.0f};
  for (int i = 0; i < 1000; ++i) x.push_back(-0.1259f * static_cast<float>(i));
  const size_t finite = x.size();
  x.insert(x.end(), {-kInfinity, -150.0f, -127.0f, kInfinity});
  const auto packed = Poisoned<uint32_t>(x.size());
  const auto power = Poisoned<float>(x.size());
  Run(PackAndExp2(stream(), static_cast<int>(x.size()), Upload(x).data(), Upload(x).data(),
                  packed.data(), power.data()));
  const std::vector<float> actual = Download(power);
  for (size_t i = 0; i < finite; ++i) {
    const double expected = std::exp2(static_cast<double>(x[i]));
    EXPECT_LE(std::fabs(actual[i] - expected), std::ldexp(expected, -22)) << x[i];
  }
  EXPECT_THAT(std::vector<float>(actual.begin() + finite, actual.end()),
              testing::ElementsAre(0, 0, 0, kInfinity));
}

}  // namespace
}  // namespace ballast::worker::cuda
