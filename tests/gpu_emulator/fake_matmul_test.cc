// MakeFakeMatmul against the definition in device/matmul.h, in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker {
namespace {

constexpr uint16_t kNan = 0x7FC0;

std::vector<BFloat16Bits> RandomValues(uint64_t seed, int64_t count) {
  std::mt19937_64 random(seed);
  std::vector<BFloat16Bits> values(count);
  for (BFloat16Bits& value : values) {
    value = FloatToBFloat16(std::normal_distribution<float>()(random));
  }
  return values;
}

double Gelu(double x) {
  return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// By a central difference, so that it does not repeat the formula under test.
double GeluGradient(double x) { return (Gelu(x + 1e-5) - Gelu(x - 1e-5)) / 2e-5; }

// The host's copies of what a product reads and writes.
struct Operands {
  Operands(int64_t m, int64_t n, int64_t k)
      : a(RandomValues(1, m * k)),
        b(RandomValues(2, k * n)),
        bias(RandomValues(3, n)),
        aux(RandomValues(4, m * n)),
        out(m * n, kNan),
        out_fp32(m * n, std::numeric_limits<float>::quiet_NaN()) {}
  std::vector<BFloat16Bits> a, b, bias, aux, out;
  std::vector<float> out_fp32;
};

double At(const std::vector<BFloat16Bits>& values, int64_t index) {
  return BFloat16ToFloat(values[index]);
}

// op(a) * op(b) at [i][j].
double ProductAt(const Matmul& matmul, const Operands& operands, int64_t i, int64_t j) {
  double sum = 0;
  for (int64_t k = 0; k < matmul.k; ++k) {
    sum += At(operands.a, matmul.transpose_a ? k * matmul.m + i : i * matmul.k + k) *
           At(operands.b, matmul.transpose_b ? j * matmul.k + k : k * matmul.n + j);
  }
  return sum;
}

// Runs the product on a device; reads back what it wrote.
void Compute(Matmul matmul, Operands& operands) {
  FakeDevice device;
  const auto stream = device.CreateStream("compute").value();
  const auto on_device = [&](auto& values) {
    auto memory = device.Allocate(values.size() * sizeof(values[0]), "operand").value();
    EXPECT_TRUE(stream
                    ->CopyToDevice(
                        memory->data(),
                        {reinterpret_cast<const std::byte*>(values.data()), memory->size_bytes()})
                    .ok());
    return memory;
  };
  const auto back = [&](const DeviceMemory& memory, auto& values) {
    EXPECT_TRUE(stream
                    ->CopyToHost({reinterpret_cast<std::byte*>(values.data()), memory.size_bytes()},
                                 memory.data())
                    .ok());
  };
  const auto a = on_device(operands.a);
  const auto b = on_device(operands.b);
  const auto bias = on_device(operands.bias);
  const auto aux = on_device(operands.aux);
  const auto out = on_device(operands.out);
  const auto out_fp32 = on_device(operands.out_fp32);
  matmul.a = a->as<BFloat16Bits>();
  matmul.b = b->as<BFloat16Bits>();
  matmul.bias = bias->as<BFloat16Bits>();
  matmul.aux = aux->as<BFloat16Bits>();
  matmul.out = matmul.out_is_fp32 ? out_fp32->data() : out->data();
  EXPECT_TRUE(MakeFakeMatmul()->Run(*stream, matmul).ok());
  back(*aux, operands.aux);
  back(*out, operands.out);
  back(*out_fp32, operands.out_fp32);
}

// Every element of `actual` is `expected` of its row and column, rounded to bf16 or nearly.
void ExpectRounded(const Matmul& matmul, const std::vector<BFloat16Bits>& actual,
                   const std::function<double(int64_t i, int64_t j)>& expected) {
  for (int64_t i = 0; i < matmul.m; ++i) {
    for (int64_t j = 0; j < matmul.n; ++j) {
      const double value = expected(i, j);
      // Half a unit in the last of eight bits, and fp32's error of the sum.
      ASSERT_NEAR(At(actual, i * matmul.n + j), value, std::abs(value) / 256 + 1e-5)
          << i << ", " << j;
    }
  }
}

class FakeMatmulShapes : public testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  static Matmul Shape(int64_t m, int64_t n, int64_t k) {
    return {.m = m,
            .n = n,
            .k = k,
            .transpose_a = std::get<0>(GetParam()),
            .transpose_b = std::get<1>(GetParam())};
  }
};

INSTANTIATE_TEST_SUITE_P(Transposes, FakeMatmulShapes,
                         testing::Combine(testing::Bool(), testing::Bool()));

TEST_P(FakeMatmulShapes, MultipliesIntoBFloat16) {
  const Matmul matmul = Shape(5, 7, 33);
  Operands operands(5, 7, 33);
  Compute(matmul, operands);
  ExpectRounded(matmul, operands.out,
                [&](int64_t i, int64_t j) { return ProductAt(matmul, operands, i, j); });
}

TEST_P(FakeMatmulShapes, MultipliesIntoFp32WithoutRoundingToBFloat16) {
  Matmul matmul = Shape(3, 9, 20);
  matmul.out_is_fp32 = true;
  Operands operands(3, 9, 20);
  Compute(matmul, operands);
  for (int64_t at = 0; at < 27; ++at) {
    ASSERT_NEAR(operands.out_fp32[at], ProductAt(matmul, operands, at / 9, at % 9), 1e-5) << at;
  }
}

TEST_P(FakeMatmulShapes, AddsToWhatIsThere) {
  Matmul matmul = Shape(4, 6, 8);
  matmul.accumulate = true;
  Operands operands(4, 6, 8);
  std::fill(operands.out.begin(), operands.out.end(), FloatToBFloat16(3));
  Compute(matmul, operands);
  ExpectRounded(matmul, operands.out,
                [&](int64_t i, int64_t j) { return 3 + ProductAt(matmul, operands, i, j); });

  matmul.out_is_fp32 = true;
  std::fill(operands.out_fp32.begin(), operands.out_fp32.end(), 0.001f);
  Compute(matmul, operands);
  for (int64_t at = 0; at < 24; ++at) {
    ASSERT_NEAR(operands.out_fp32[at], 0.001 + ProductAt(matmul, operands, at / 6, at % 6), 1e-5);
  }
}

TEST_P(FakeMatmulShapes, AddsABiasToEachColumn) {
  Matmul matmul = Shape(5, 7, 3);
  matmul.epilogue = MatmulEpilogue::kBias;
  Operands operands(5, 7, 3);
  Compute(matmul, operands);
  ExpectRounded(matmul, operands.out, [&](int64_t i, int64_t j) {
    return ProductAt(matmul, operands, i, j) + At(operands.bias, j);
  });
}

TEST_P(FakeMatmulShapes, KeepsWhatGeluWasTakenOf) {
  Matmul matmul = Shape(6, 5, 4);
  matmul.epilogue = MatmulEpilogue::kBiasGelu;
  Operands operands(6, 5, 4);
  Compute(matmul, operands);
  const auto before = [&](int64_t i, int64_t j) {
    return ProductAt(matmul, operands, i, j) + At(operands.bias, j);
  };
  ExpectRounded(matmul, operands.aux, before);
  ExpectRounded(matmul, operands.out, [&](int64_t i, int64_t j) { return Gelu(before(i, j)); });
}

TEST_P(FakeMatmulShapes, MultipliesByTheGradientOfGelu) {
  Matmul matmul = Shape(5, 6, 4);
  matmul.epilogue = MatmulEpilogue::kGeluBackward;
  Operands operands(5, 6, 4);
  const std::vector<BFloat16Bits> aux = operands.aux;
  Compute(matmul, operands);
  EXPECT_EQ(operands.aux, aux);
  ExpectRounded(matmul, operands.out, [&](int64_t i, int64_t j) {
    return ProductAt(matmul, operands, i, j) * GeluGradient(At(aux, i * 6 + j));
  });
}

TEST(FakeMatmul, RoundsOnceAtTheEnd) {
  // 1 + 256 * 2^-9 = 1.5 exactly; rounded to bf16 after each addition it would stay 1.
  const Matmul matmul{.m = 1, .n = 1, .k = 257};
  Operands operands(1, 1, 257);
  std::fill(operands.a.begin(), operands.a.end(), FloatToBFloat16(1));
  std::fill(operands.b.begin(), operands.b.end(), FloatToBFloat16(0x1p-9f));
  operands.b[0] = FloatToBFloat16(1);
  Compute(matmul, operands);
  EXPECT_EQ(BFloat16ToFloat(operands.out[0]), 1.5f);
}

TEST(FakeMatmulDeathTest, RefusesAProductOverItsFactor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  FakeDevice device;
  const auto stream = device.CreateStream("compute").value();
  const auto memory = device.Allocate(64, "operand").value();
  auto* operand = memory->as<BFloat16Bits>();
  EXPECT_DEATH(
      (void)MakeFakeMatmul()->Run(
          *stream, {.m = 4, .n = 4, .k = 4, .a = operand, .b = operand + 16, .out = operand + 8}),
      "does not overlap");
}

}  // namespace
}  // namespace ballast::worker
