// Matrix products on a GPU against the definition in device/matmul.h, in double.
#include "gpu_worker/cuda/cublaslt_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "tests/gpu_worker/cuda/kernel_test.h"
#include "tests/gpu_worker/gpt/test_matmul.h"

namespace ballast::worker::cuda {
namespace {

double Gelu(double x) {
  return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
// By a central difference, so that it does not repeat the formula under test.
double GeluGradient(double x) { return (Gelu(x + 1e-5) - Gelu(x - 1e-5)) / 2e-5; }

struct Shape {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
};
// One tile and less, several, and a layer of GPT-2's with few rows.
constexpr Shape kShapes[] = {{8, 8, 8}, {24, 40, 56}, {256, 192, 320}, {64, 2304, 768}};

class CublasLtMatmulTest : public KernelTest,
                           public testing::WithParamInterface<std::tuple<bool, bool>> {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto matmul = MakeTestMatmul(device());
    ASSERT_TRUE(matmul.ok()) << matmul.status();
    matmul_ = *std::move(matmul);
  }
  bool transpose_a() const { return std::get<0>(GetParam()); }
  bool transpose_b() const { return std::get<1>(GetParam()); }

  // Operands are on the device, and described by the result.
  Matmul Operands(const Shape& shape, size_t offset = 0) {
    shape_ = shape;
    a_ = RandomBFloat16(shape.m * shape.k, 1);
    b_ = RandomBFloat16(shape.k * shape.n, 2);
    on_device_.push_back(Upload(a_, offset));
    on_device_.push_back(Upload(b_, offset));
    return {.m = shape.m,
            .n = shape.n,
            .k = shape.k,
            .transpose_a = transpose_a(),
            .transpose_b = transpose_b(),
            .a = on_device_[on_device_.size() - 2].data(),
            .b = on_device_.back().data()};
  }
  void Multiply(const Matmul& matmul) { Run(matmul_->Run(stream(), matmul)); }

  // op(a) * op(b), row-major.
  std::vector<double> Product() const {
    const auto [m, n, k] = shape_;
    const std::vector<double> a = Widen<double>(a_);
    const std::vector<double> b = Widen<double>(b_);
    std::vector<double> product(m * n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t l = 0; l < k; ++l) {
        const double factor = a[transpose_a() ? l * m + i : i * k + l];
        for (int64_t j = 0; j < n; ++j) {
          product[i * n + j] += factor * b[transpose_b() ? j * k + l : l * n + j];
        }
      }
    }
    return product;
  }
  // What fp32 sums of k products of normal values may be off by, in any order.
  double SumError() const { return 1e-6 * shape_.k; }
  void ExpectRounded(const DeviceArray<BFloat16Bits>& actual, const std::vector<double>& expected) {
    ExpectClose("element", Widen<double>(Download(actual)), expected, kBFloat16Rounding,
                SumError());
  }

 private:
  Shape shape_;
  std::vector<BFloat16Bits> a_;
  std::vector<BFloat16Bits> b_;
  std::vector<DeviceArray<BFloat16Bits>> on_device_;
  std::unique_ptr<DeviceMatmul> matmul_;
};

INSTANTIATE_TEST_SUITE_P(Transposes, CublasLtMatmulTest,
                         testing::Combine(testing::Bool(), testing::Bool()));

TEST_P(CublasLtMatmulTest, MultipliesIntoBFloat16) {
  for (const Shape& shape : kShapes) {
    Matmul matmul = Operands(shape);
    const auto out = Poisoned<BFloat16Bits>(shape.m * shape.n);
    matmul.out = out.data();
    Multiply(matmul);
    ExpectRounded(out, Product());
  }
}

TEST_P(CublasLtMatmulTest, MultipliesIntoFp32AndAddsToIt) {
  for (const Shape& shape : kShapes) {
    Matmul matmul = Operands(shape);
    const auto out = Poisoned<float>(shape.m * shape.n);
    matmul.out = out.data();
    matmul.out_is_fp32 = true;
    Multiply(matmul);
    std::vector<double> expected = Product();
    ExpectClose("element", Download(out), expected, 1e-6, SumError());

    matmul.accumulate = true;
    Multiply(matmul);
    for (double& value : expected) value *= 2;
    ExpectClose("element of the sum", Download(out), expected, 1e-6, 2 * SumError());
  }
}

TEST_P(CublasLtMatmulTest, AddsTheBias) {
  for (const Shape& shape : kShapes) {
    Matmul matmul = Operands(shape);
    const std::vector<BFloat16Bits> bias = RandomBFloat16(shape.n, 3);
    const auto bias_on_device = Upload(bias);
    const auto out = Poisoned<BFloat16Bits>(shape.m * shape.n);
    matmul.out = out.data();
    matmul.epilogue = MatmulEpilogue::kBias;
    matmul.bias = bias_on_device.data();
    Multiply(matmul);
    std::vector<double> expected = Product();
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] += BFloat16ToFloat(bias[i % shape.n]);
    }
    ExpectRounded(out, expected);
  }
}

TEST_P(CublasLtMatmulTest, KeepsWhatGeluWasTakenOf) {
  for (const Shape& shape : kShapes) {
    Matmul matmul = Operands(shape);
    const std::vector<BFloat16Bits> bias = RandomBFloat16(shape.n, 3);
    const auto bias_on_device = Upload(bias);
    const auto out = Poisoned<BFloat16Bits>(shape.m * shape.n);
    const auto aux = Poisoned<BFloat16Bits>(shape.m * shape.n);
    matmul.out = out.data();
    matmul.epilogue = MatmulEpilogue::kBiasGelu;
    matmul.bias = bias_on_device.data();
    matmul.aux = aux.data();
    Multiply(matmul);
    std::vector<double> before = Product();
    std::vector<double> after(before.size());
    for (size_t i = 0; i < before.size(); ++i) {
      before[i] += BFloat16ToFloat(bias[i % shape.n]);
      after[i] = Gelu(before[i]);
    }
    ExpectRounded(aux, before);
    // The library takes tanh by the hardware's approximation, which is good to 2^-11.
    ExpectClose("gelu", Widen<double>(Download(out)), after, kBFloat16Rounding,
                SumError() + 1.0 / 1024);
  }
}

TEST_P(CublasLtMatmulTest, MultipliesByTheGradientOfGelu) {
  for (const Shape& shape : kShapes) {
    Matmul matmul = Operands(shape);
    const std::vector<BFloat16Bits> aux = RandomBFloat16(shape.m * shape.n, 4);
    const auto aux_on_device = Upload(aux);
    const auto out = Poisoned<BFloat16Bits>(shape.m * shape.n);
    matmul.out = out.data();
    matmul.epilogue = MatmulEpilogue::kGeluBackward;
    matmul.aux = aux_on_device.data();
    Multiply(matmul);
    std::vector<double> expected = Product();
    double largest = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(largest, std::fabs(expected[i]));
      expected[i] *= GeluGradient(BFloat16ToFloat(aux[i]));
    }
    ExpectClose("element", Widen<double>(Download(out)), expected, kBFloat16Rounding,
                SumError() + largest / 1024);
  }
}

// Parameters stand anywhere in a flat space.
TEST_P(CublasLtMatmulTest, TakesOperandsThatAreAlignedToFewBytes) {
  Matmul matmul = Operands({64, 64, 64}, /*offset=*/4);
  const auto out = Poisoned<BFloat16Bits>(64 * 64, /*offset=*/4);
  matmul.out = out.data();
  Multiply(matmul);
  ExpectRounded(out, Product());
}

TEST_P(CublasLtMatmulTest, SameBitsInEveryRun) {
  Matmul matmul = Operands({128, 768, 4096});  // Long sums: the library may split them.
  matmul.out_is_fp32 = true;
  std::vector<float> first;
  for (int run = 0; run < 5; ++run) {
    const auto out = Poisoned<float>(128 * 768);
    matmul.out = out.data();
    Multiply(matmul);
    if (run == 0) first = Download(out);
    ExpectSameBits("element", Download(out), first);
  }
}

}  // namespace
}  // namespace ballast::worker::cuda
