// Newton-Schulz on a device, against the iteration that the service makes in fp32.
#include "gpu_worker/muon/device_newton_schulz.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
#include "tests/gpu_worker/cuda/kernel_test.h"
#include "tests/gpu_worker/gpt/test_matmul.h"

namespace ballast::worker::cuda {
namespace {

constexpr MatrixShape kShapes[] = {{48, 48}, {32, 96}, {96, 32}, {128, 40}, {8, 200}};

class DeviceNewtonSchulzTest : public KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto matmul = MakeTestMatmul(device());
    ASSERT_TRUE(matmul.ok()) << matmul.status();
    matmul_ = *std::move(matmul);
    auto made = DeviceNewtonSchulz::Create(device(), *matmul_, kShapes);
    ASSERT_TRUE(made.ok()) << made.status();
    newton_schulz_ = *std::move(made);
  }

  std::vector<BFloat16Bits> Orthogonal(const MatrixShape& shape,
                                       const std::vector<BFloat16Bits>& direction,
                                       const HyperParameters& values) {
    const auto bytes = [](auto& v) {
      return absl::MakeSpan(reinterpret_cast<std::byte*>(v.data()), v.size() * sizeof(v[0]));
    };
    std::vector<BFloat16Bits> given = direction;
    std::vector<BFloat16Bits> made(direction.size());
    Run(stream().CopyToDevice(newton_schulz_->direction(), bytes(given)));
    const auto at = newton_schulz_->Run(stream(), shape, values);
    EXPECT_TRUE(at.ok()) << at.status();
    if (at.ok()) Run(stream().CopyToHost(bytes(made), *at));
    return made;
  }

 private:
  std::unique_ptr<DeviceMatmul> matmul_;
  std::unique_ptr<DeviceNewtonSchulz> newton_schulz_;
};

TEST_F(DeviceNewtonSchulzTest, IsTheServicesButForBFloat16) {
  for (const MatrixShape& shape : kShapes) {
    const auto direction = RandomBFloat16(shape.rows * shape.columns, 1);
    for (const int steps : {0, 1, 5}) {
      HyperParameters values = DefaultsOf(Rule::kMuon);
      values.ns_steps = steps;
      std::vector<BFloat16Bits> reference = direction;
      OrthogonalizeReference(absl::MakeSpan(reference), shape.rows, shape.columns, values);
      const std::vector<double> expected = Widen<double>(reference);
      const std::vector<double> made = Widen<double>(Orthogonal(shape, direction, values));
      double largest = 0;
      double apart = 0;
      for (size_t i = 0; i < made.size(); ++i) {
        largest = std::max(largest, std::fabs(expected[i]));
        apart = std::max(apart, std::fabs(made[i] - expected[i]));
      }
      // Each iteration rounds X and both products, of which it multiplies one with 4.8.
      EXPECT_LT(apart / largest, steps == 0 ? 0.01 : 0.04)
          << shape.rows << " x " << shape.columns << ", " << steps << " steps";
    }
  }
}

TEST_F(DeviceNewtonSchulzTest, HasTheSameBitsAgain) {
  const MatrixShape shape = {96, 32};
  const auto direction = RandomBFloat16(shape.rows * shape.columns, 2);
  const HyperParameters values = DefaultsOf(Rule::kMuon);
  const auto first = Orthogonal(shape, direction, values);
  EXPECT_EQ(Orthogonal(shape, direction, values), first);
}

TEST_F(DeviceNewtonSchulzTest, WhatIsNotFiniteMakesONotFinite) {
  for (const MatrixShape& shape : kShapes) {
    auto direction = RandomBFloat16(shape.rows * shape.columns, 3);
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      direction[7] = FloatToBFloat16(value);
      const auto made = Widen<double>(Orthogonal(shape, direction, DefaultsOf(Rule::kMuon)));
      EXPECT_FALSE(std::ranges::all_of(made, [](double x) { return std::isfinite(x); }));
    }
  }
}

}  // namespace
}  // namespace ballast::worker::cuda
