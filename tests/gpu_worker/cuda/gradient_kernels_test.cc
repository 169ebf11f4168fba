#include <gtest/gtest.h>

#include "gpu_worker/cuda/kernels/gradient.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

// Elements, and how far past an aligned place arrays begin.
struct Case {
  size_t elements;
  size_t offset;
};
constexpr Case kCases[] = {{1, 0}, {3, 0}, {4, 0}, {1023, 0}, {4097, 0}, {1030, 1}};

class GradientKernels : public KernelTest {
 protected:
  uint64_t FirstNonFinite(const std::vector<float>& values, DType dtype, uint64_t offset,
                          uint64_t before = kNoneNonFinite) {
    const auto gradient = Upload(values);
    const auto first = Upload(std::vector<uint64_t>{before});
    Run(FindNonFinite(stream(), static_cast<int64_t>(values.size()), gradient.data(), dtype, offset,
                      first.data()));
    return Download(first)[0];
  }
};

TEST_F(GradientKernels, RoundingIsThatOfTheWireFormat) {
  for (const DType dtype : kDTypes) {
    for (const auto [elements, offset] : kCases) {
      const std::vector<float> values = HardFloats(elements, 1);
      const auto from = Upload(values, offset);
      const auto to = Poisoned<std::byte>(elements * SizeBytes(dtype), offset * SizeBytes(dtype));
      Run(RoundGradient(stream(), static_cast<int64_t>(elements), from.data(), dtype, to.data()));
      ExpectSameBits(std::string(Name(dtype)), FromWire(Download(to), dtype),
                     FromWire(ToWire(values, dtype), dtype));
    }
  }
}

TEST_F(GradientKernels, EveryFiniteHalfwayCaseRoundsToEven) {
  // Each bf16, and the fp32 values at, just below and just above the middle to the next one.
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x7fffu, 0x8000u, 0x8001u}) {
      const uint32_t bits = high << 16 | low;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      values.push_back(value);
    }
  }
  const auto from = Upload(values);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const auto to = Poisoned<std::byte>(values.size() * SizeBytes(dtype));
    Run(RoundGradient(stream(), static_cast<int64_t>(values.size()), from.data(), dtype,
                      to.data()));
    ExpectSameBits(std::string(Name(dtype)), FromWire(Download(to), dtype),
                   FromWire(ToWire(values, dtype), dtype));
  }
}

TEST_F(GradientKernels, FiniteGradientsHaveNoNonFiniteElement) {
  EXPECT_EQ(FirstNonFinite(RandomFloats(1000, 4), DType::kBFloat16, 0), kNoneNonFinite);
}

TEST_F(GradientKernels, TheFirstNonFiniteElementIsFoundWhereverItIs) {
  for (const size_t at : {0, 1, 3, 4, 517, 1026, 1029}) {
    std::vector<float> values = RandomFloats(1030, 5);
    values[at] = at % 2 == 0 ? NAN : -INFINITY;
    if (at < 1029) values[at + 1] = INFINITY;  // Mostly the same thread's.
    EXPECT_EQ(FirstNonFinite(values, DType::kFloat32, 5000), 5000 + at);
  }
}

TEST_F(GradientKernels, AnEarlierFindStays) {
  std::vector<float> values(100, 1.0f);
  values[7] = NAN;
  EXPECT_EQ(FirstNonFinite(values, DType::kFloat32, 100, 50), 50u);
  EXPECT_EQ(FirstNonFinite(values, DType::kFloat32, 100, 107), 107u);
  EXPECT_EQ(FirstNonFinite(values, DType::kFloat32, 100, 108), 107u);
}

TEST_F(GradientKernels, WhatRoundsToInfinityIsNotFinite) {
  // For each format: the last value that rounds to a finite one, and the first that does not.
  const std::vector<float> bf16 = {0x1.fefffep127f, 0x1.ffp127f};
  EXPECT_EQ(FirstNonFinite(bf16, DType::kBFloat16, 0), 1u);
  EXPECT_EQ(FirstNonFinite(bf16, DType::kFloat32, 0), kNoneNonFinite);
  const std::vector<float> fp16 = {65519.0f, 65520.0f};
  EXPECT_EQ(FirstNonFinite(fp16, DType::kFloat16, 0), 1u);
  EXPECT_EQ(FirstNonFinite(fp16, DType::kBFloat16, 0), kNoneNonFinite);
}

}  // namespace
}  // namespace ballast::worker::cuda
