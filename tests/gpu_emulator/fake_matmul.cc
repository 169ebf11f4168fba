#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker {
namespace {

constexpr float kSqrt2OverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;

float Gelu(float x) {
  const float u = kSqrt2OverPi * (x + kCubic * x * x * x);
  return 0.5f * x * (1 + std::tanh(u));
}

float GeluGradient(float x) {
  const float t = std::tanh(kSqrt2OverPi * (x + kCubic * x * x * x));
  const float du = kSqrt2OverPi * (1 + 3 * kCubic * x * x);
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * du;
}

// Row-major rows x columns in fp32, of what is stored so or as its transpose.
std::vector<float> Widen(const BFloat16Bits* stored, bool transposed, int64_t rows,
                         int64_t columns) {
  std::vector<float> wide(rows * columns);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      wide[r * columns + c] = BFloat16ToFloat(stored[transposed ? c * rows + r : r * columns + c]);
    }
  }
  return wide;
}

// Each element's sum goes over k in order.
std::vector<float> Product(const Matmul& matmul) {
  const std::vector<float> a = Widen(matmul.a, matmul.transpose_a, matmul.m, matmul.k);
  const std::vector<float> b = Widen(matmul.b, matmul.transpose_b, matmul.k, matmul.n);
  std::vector<float> product(matmul.m * matmul.n);
  for (int64_t i = 0; i < matmul.m; ++i) {
    float* row = product.data() + i * matmul.n;
    for (int64_t k = 0; k < matmul.k; ++k) {
      const float factor = a[i * matmul.k + k];
      const float* b_row = b.data() + k * matmul.n;
      for (int64_t j = 0; j < matmul.n; ++j) row[j] += factor * b_row[j];
    }
  }
  return product;
}

// What becomes of one element of the product; `at` is its place, `column` its column.
float Finish(const Matmul& matmul, float value, int64_t at, int64_t column) {
  switch (matmul.epilogue) {
    case MatmulEpilogue::kNone:
      value *= matmul.alpha;
      if (matmul.beta == 0) return value;
      return value + matmul.beta *
                         (matmul.out_is_fp32
                              ? static_cast<const float*>(matmul.out)[at]
                              : BFloat16ToFloat(static_cast<const BFloat16Bits*>(matmul.out)[at]));
    case MatmulEpilogue::kBias:
      return value + BFloat16ToFloat(matmul.bias[column]);
    case MatmulEpilogue::kBiasGelu:
      value += BFloat16ToFloat(matmul.bias[column]);
      matmul.aux[at] = FloatToBFloat16(value);
      return Gelu(value);
    case MatmulEpilogue::kGeluBackward:
      return value * GeluGradient(BFloat16ToFloat(matmul.aux[at]));
  }
  return value;
}

void Compute(const Matmul& matmul) {
  const std::vector<float> product = Product(matmul);
  for (int64_t at = 0; at < matmul.m * matmul.n; ++at) {
    const float value = Finish(matmul, product[at], at, at % matmul.n);
    if (matmul.out_is_fp32) {
      static_cast<float*>(matmul.out)[at] = value;
    } else {
      static_cast<BFloat16Bits*>(matmul.out)[at] = FloatToBFloat16(value);
    }
  }
}

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto* a_begin = static_cast<const std::byte*>(a);
  const auto* b_begin = static_cast<const std::byte*>(b);
  return a_begin < b_begin + b_bytes && b_begin < a_begin + a_bytes;
}

class FakeMatmul final : public DeviceMatmul {
 public:
  absl::Status Run(DeviceStream& stream, const Matmul& matmul) override {
    CheckArguments(matmul);
    return GiveToFakeStream(stream, "matmul", [matmul] { Compute(matmul); });
  }

 private:
  static void CheckArguments(const Matmul& matmul) {
    const MatmulEpilogue epilogue = matmul.epilogue;
    Check(matmul.m > 0 && matmul.n > 0 && matmul.k > 0, "a product has elements");
    Check(epilogue == MatmulEpilogue::kNone ||
              (!matmul.out_is_fp32 && matmul.alpha == 1 && matmul.beta == 0),
          "fp32 and factors go with no epilogue");
    const bool biased = epilogue == MatmulEpilogue::kBias || epilogue == MatmulEpilogue::kBiasGelu;
    Check(!biased || matmul.bias != nullptr, "the epilogue has its bias");
    const bool needs_aux =
        epilogue == MatmulEpilogue::kBiasGelu || epilogue == MatmulEpilogue::kGeluBackward;
    Check(!needs_aux || matmul.aux != nullptr, "the epilogue has its aux");
    // Here every input is read before anything is written; on a GPU it is not.
    const int64_t out_bytes = matmul.m * matmul.n * (matmul.out_is_fp32 ? 4 : 2);
    Check(!Overlap(matmul.out, out_bytes, matmul.a, 2 * matmul.m * matmul.k) &&
              !Overlap(matmul.out, out_bytes, matmul.b, 2 * matmul.k * matmul.n),
          "a product does not overlap its factors");
  }
};

}  // namespace

std::unique_ptr<DeviceMatmul> MakeFakeMatmul() { return std::make_unique<FakeMatmul>(); }

}  // namespace ballast::worker
