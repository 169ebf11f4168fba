#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "gpu_worker/cuda/kernels/unit_norm.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

constexpr float kEps = 1e-7f;

class UnitNormKernels : public KernelTest {
 protected:
  std::vector<BFloat16Bits> Divided(const std::vector<BFloat16Bits>& values) {
    const auto x = Upload(values);
    const auto sums = Poisoned<double>(kNormSums);
    Run(DivideByNorm(stream(), static_cast<int64_t>(values.size()), kEps, x.data(), sums.data()));
    return Download(x);
  }
};

float Rounded(float value) { return BFloat16ToFloat(FloatToBFloat16(value)); }

// Less than a block has, several blocks, and more elements than all threads take at first.
TEST_F(UnitNormKernels, DividesByTheNormInBFloat16) {
  for (const int64_t elements : {1, 75, 256 * 16 + 1, 256 * 16 * 300 + 17}) {
    const std::vector<BFloat16Bits> values = RandomBFloat16(elements, 1);
    double sum = 0;
    for (const double value : Widen<double>(values)) sum += value * value;
    const float norm = Rounded(std::sqrt(static_cast<float>(sum)));
    std::vector<BFloat16Bits> expected;
    for (const BFloat16Bits bits : values) {
      expected.push_back(FloatToBFloat16(BFloat16ToFloat(bits) / norm));
    }
    EXPECT_EQ(Divided(values), expected) << elements << " elements";
  }
}

TEST_F(UnitNormKernels, ANormBelowEpsIsEps) {
  EXPECT_EQ(Divided(std::vector<BFloat16Bits>(64, 0)), std::vector<BFloat16Bits>(64, 0));
  const BFloat16Bits tiny = FloatToBFloat16(1e-9f);
  const BFloat16Bits expected = FloatToBFloat16(BFloat16ToFloat(tiny) / Rounded(kEps));
  EXPECT_EQ(Divided({tiny}), std::vector<BFloat16Bits>{expected});
}

// It must stay so in the product, where the service looks for it.
TEST_F(UnitNormKernels, WhatIsNotFiniteStaysSo) {
  std::vector<BFloat16Bits> values = RandomBFloat16(300, 2);
  values[77] = FloatToBFloat16(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(Divided(values)[77])));
  values[77] = FloatToBFloat16(std::numeric_limits<float>::infinity());
  EXPECT_FALSE(std::isfinite(BFloat16ToFloat(Divided(values)[77])));
}

}  // namespace
}  // namespace ballast::worker::cuda
