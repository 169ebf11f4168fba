// Matrix products on a GPU against the definition in device/matmul.h, in double.
#include "gpu_worker/cuda/cublaslt_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
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
// Which of the operands lie transposed.
struct Way {
  bool transpose_a = false;
  bool transpose_b = false;
};
// Those that a model has: its layers, the gradients of their inputs, those of their weights. What
// else the library can do is its own affair.
constexpr Way kForward = {.transpose_b = true};
constexpr Way kInputGradient = {};
constexpr Way kWeightGradient = {.transpose_a = true};

// A token, a few, many; less than a tile and more, and a layer of GPT-2's with few rows. Lengths of
// rows in memory are multiples of 8, numbers of tokens are any.
constexpr Shape kLayers[] = {
    {1, 64, 64}, {51, 192, 64}, {24, 40, 56}, {256, 192, 320}, {64, 2304, 768}};
// With the tokens as k.
constexpr Shape kWeights[] = {
    {64, 64, 1}, {192, 64, 51}, {40, 56, 24}, {192, 320, 256}, {2304, 768, 64}};

class CublasLtMatmulTest : public KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto matmul = MakeTestMatmul(device());
    ASSERT_TRUE(matmul.ok()) << matmul.status();
    matmul_ = *std::move(matmul);
  }

  // Operands are on the device, and described by the result.
  Matmul Operands(const Way& way, const Shape& shape, size_t offset = 0) {
    way_ = way;
    shape_ = shape;
    a_ = RandomBFloat16(shape.m * shape.k, 1);
    b_ = RandomBFloat16(shape.k * shape.n, 2);
    on_device_.push_back(Upload(a_, offset));
    on_device_.push_back(Upload(b_, offset));
    return {.m = shape.m,
            .n = shape.n,
            .k = shape.k,
            .transpose_a = way.transpose_a,
            .transpose_b = way.transpose_b,
            .a = on_device_[on_device_.size() - 2].data(),
            .b = on_device_.back().data()};
  }
  absl::Status Give(const Matmul& matmul) { return matmul_->Run(stream(), matmul); }
  void Multiply(const Matmul& matmul) { Run(Give(matmul)); }

  // op(a) * op(b), row-major.
  std::vector<double> Product() const {
    const auto [m, n, k] = shape_;
    const std::vector<double> a = Widen<double>(a_);
    const std::vector<double> b = Widen<double>(b_);
    std::vector<double> product(m * n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t l = 0; l < k; ++l) {
        const double factor = a[way_.transpose_a ? l * m + i : i * k + l];
        for (int64_t j = 0; j < n; ++j) {
          product[i * n + j] += factor * b[way_.transpose_b ? j * k + l : l * n + j];
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
  Way way_;
  Shape shape_;
  std::vector<BFloat16Bits> a_;
  std::vector<BFloat16Bits> b_;
  std::vector<DeviceArray<BFloat16Bits>> on_device_;
  std::unique_ptr<DeviceMatmul> matmul_;
};

TEST_F(CublasLtMatmulTest, MultipliesIntoBFloat16) {
  for (const Way& way : {kForward, kInputGradient}) {
    for (const Shape& shape : kLayers) {
      Matmul matmul = Operands(way, shape);
      const auto out = Poisoned<BFloat16Bits>(shape.m * shape.n);
      matmul.out = out.data();
      Multiply(matmul);
      ExpectRounded(out, Product());
    }
  }
}

TEST_F(CublasLtMatmulTest, MultipliesIntoFp32AndAddsToIt) {
  for (const Shape& shape : kWeights) {
    Matmul matmul = Operands(kWeightGradient, shape);
    const auto out = Poisoned<float>(shape.m * shape.n);
    matmul.out = out.data();
    matmul.out_is_fp32 = true;
    Multiply(matmul);
    std::vector<double> expected = Product();
    ExpectClose("element", Download(out), expected, 1e-6, SumError());

    matmul.beta = 1;
    Multiply(matmul);
    for (double& value : expected) value *= 2;
    ExpectClose("element of the sum", Download(out), expected, 1e-6, 2 * SumError());
  }
}

// As Newton-Schulz needs it.
TEST_F(CublasLtMatmulTest, ScalesAndAddsInBFloat16) {
  for (const Way& way : {Way{}, Way{.transpose_b = true}}) {
    for (const Shape& shape : kLayers) {
      Matmul matmul = Operands(way, shape);
      const std::vector<BFloat16Bits> before = RandomBFloat16(shape.m * shape.n, 3);
      const auto out = Upload(before);
      matmul.out = out.data();
      matmul.alpha = 2.0315f;
      matmul.beta = -4.775f;
      Multiply(matmul);
      std::vector<double> expected = Product();
      for (size_t i = 0; i < expected.size(); ++i) {
        expected[i] =
            double{matmul.alpha} * expected[i] + double{matmul.beta} * BFloat16ToFloat(before[i]);
      }
      ExpectRounded(out, expected);
    }
  }
}

TEST_F(CublasLtMatmulTest, AddsTheBias) {
  for (const Shape& shape : kLayers) {
    Matmul matmul = Operands(kForward, shape);
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

TEST_F(CublasLtMatmulTest, KeepsWhatGeluWasTakenOf) {
  for (const Shape& shape : kLayers) {
    Matmul matmul = Operands(kForward, shape);
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

TEST_F(CublasLtMatmulTest, MultipliesByTheGradientOfGelu) {
  for (const Shape& shape : kLayers) {
    Matmul matmul = Operands(kInputGradient, shape);
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

// Parameters are at multiples of 16 bytes in a flat space.
TEST_F(CublasLtMatmulTest, TakesOperandsThatAreAlignedTo16Bytes) {
  for (const Way& way : {kForward, kInputGradient}) {
    Matmul matmul = Operands(way, {64, 64, 64}, /*offset=*/8);
    const auto out = Poisoned<BFloat16Bits>(64 * 64, /*offset=*/8);
    matmul.out = out.data();
    Multiply(matmul);
    ExpectRounded(out, Product());
  }
  Matmul matmul = Operands(kWeightGradient, {64, 64, 64}, /*offset=*/8);
  const auto out = Poisoned<float>(64 * 64, /*offset=*/4);
  matmul.out = out.data();
  matmul.out_is_fp32 = true;
  Multiply(matmul);
  ExpectClose("element", Download(out), Product(), 1e-6, SumError());
}

TEST_F(CublasLtMatmulTest, SameBitsInEveryRun) {
  // Long sums: the library may split them.
  for (const Way& way : {kForward, kInputGradient, kWeightGradient}) {
    Matmul matmul = Operands(way, {128, 768, 4096});
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
}

// Rows of 14 bytes, which no tensor core can load: computed all the same, or refused with the
// sizes.
TEST_F(CublasLtMatmulTest, WhatTheLibraryCannotDoIsAnErrorThatNamesIt) {
  const Shape shape = {16, 7, 9};
  for (const Way& way : {kForward, kInputGradient, kWeightGradient, Way{true, true}}) {
    Matmul matmul = Operands(way, shape);
    const std::vector<BFloat16Bits> bias(shape.n, 0);
    const auto bias_on_device = Upload(bias);
    const auto out = Poisoned<BFloat16Bits>(shape.m * shape.n);
    const auto aux = Poisoned<BFloat16Bits>(shape.m * shape.n);
    matmul.out = out.data();
    matmul.epilogue = MatmulEpilogue::kBiasGelu;
    matmul.bias = bias_on_device.data();
    matmul.aux = aux.data();
    const absl::Status status = Give(matmul);
    if (status.ok()) {
      Run(status);
      ExpectRounded(aux, Product());
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("m=16 n=7 k=9"));
  }
}

}  // namespace
}  // namespace ballast::worker::cuda
