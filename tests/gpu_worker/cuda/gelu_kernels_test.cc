#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "gpu_worker/cuda/kernels/gelu.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

double Gelu(double x) {
  return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
// By a central difference, so that it does not repeat the formula under test.
double GeluGradient(double x) { return (Gelu(x + 1e-5) - Gelu(x - 1e-5)) / 2e-5; }

class GeluKernels : public KernelTest {
 protected:
  static constexpr int64_t kRows = 7, kColumns = 75;
  // From far below zero to far above it.
  static std::vector<float> Values(uint64_t seed) {
    return RandomFloats(kRows * kColumns, seed, 6.0f);
  }
};

TEST_F(GeluKernels, ForwardKeepsWhatGeluWasTakenOf) {
  const std::vector<float> product = Values(1);
  const std::vector<BFloat16Bits> bias = RandomBFloat16(kColumns, 2);
  const auto d_product = Upload(product);
  const auto d_bias = Upload(bias);
  const auto aux = Poisoned<BFloat16Bits>(product.size());
  const auto out = Poisoned<BFloat16Bits>(product.size());
  Run(BiasGelu(stream(), kRows, kColumns, d_product.data(), d_bias.data(), aux.data(), out.data()));
  std::vector<BFloat16Bits> before;
  std::vector<double> after;
  for (size_t i = 0; i < product.size(); ++i) {
    const float x = product[i] + BFloat16ToFloat(bias[i % kColumns]);
    before.push_back(FloatToBFloat16(x));
    after.push_back(Gelu(x));
  }
  EXPECT_EQ(Download(aux), before);
  ExpectClose("gelu", Widen<double>(Download(out)), after, kBFloat16Rounding, 1e-6);
}

TEST_F(GeluKernels, BackwardMultipliesByTheGradient) {
  const std::vector<float> product = Values(3);
  const std::vector<BFloat16Bits> aux = RandomBFloat16(kRows * kColumns, 4);
  const auto d_product = Upload(product);
  const auto d_aux = Upload(aux);
  const auto out = Poisoned<BFloat16Bits>(product.size());
  Run(GeluBackward(stream(), kRows * kColumns, d_product.data(), d_aux.data(), out.data()));
  std::vector<double> expected;
  for (size_t i = 0; i < product.size(); ++i) {
    expected.push_back(product[i] * GeluGradient(BFloat16ToFloat(aux[i])));
  }
  ExpectClose("element", Widen<double>(Download(out)), expected, kBFloat16Rounding, 1e-5);
}

}  // namespace
}  // namespace ballast::worker::cuda
