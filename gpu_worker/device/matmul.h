// Matrix products on the device, as a linear layer and its backward pass need them.
//
// Row-major throughout. With op(X) = X or its transpose:
//
//   product[m][n] = sum over k of op(a)[m][k] * op(b)[k][n]        bf16 inputs, fp32 accumulation
//   kNone:          out = alpha * product + beta * out
//   kBias:          out = product + bias[n]
//   kBiasGelu:      aux = product + bias[n];  out = gelu(aux)      aux is kept for backward
//   kGeluBackward:  out = product * gelu'(aux)
//
//   gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))          Hendrycks, Gimpel 2016
//
// The same inputs give the same bits in every run on the same device.
#ifndef BALLAST_GPU_WORKER_DEVICE_MATMUL_H_
#define BALLAST_GPU_WORKER_DEVICE_MATMUL_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

// The 16 bits of a bfloat16, in the device's memory.
using BFloat16Bits = uint16_t;

enum class MatmulEpilogue : uint8_t { kNone, kBias, kBiasGelu, kGeluBackward };

struct Matmul {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  bool transpose_a = false;  // `a` is stored k x m.
  bool transpose_b = false;  // `b` is stored n x k.
  const BFloat16Bits* a = nullptr;
  const BFloat16Bits* b = nullptr;
  // m x n: bf16, or fp32 with kNone (weight gradients).
  void* out = nullptr;
  bool out_is_fp32 = false;
  // kNone only. Where beta is 0, `out` is not read.
  float alpha = 1;
  float beta = 0;
  MatmulEpilogue epilogue = MatmulEpilogue::kNone;
  const BFloat16Bits* bias = nullptr;  // n elements.
  BFloat16Bits* aux = nullptr;         // m x n; written by kBiasGelu, read by kGeluBackward.
};

// Threads: one caller at a time. Errors: those of device.h; INVALID_ARGUMENT if the library has no
// way to compute it on this device, with the sizes.
class DeviceMatmul {
 public:
  virtual ~DeviceMatmul() = default;
  virtual absl::Status Run(DeviceStream& stream, const Matmul& matmul) = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_MATMUL_H_
