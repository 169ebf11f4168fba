#include "gpu_worker/cuda/kernels/gelu.h"
#include "gpu_worker/cuda/numeric.cuh"

namespace ballast::worker::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr float kSqrt2OverPi = 0.7978845608f;
constexpr float kCubic = 0.044715f;

__device__ __forceinline__ float Tanh(float x) {
  return tanhf(kSqrt2OverPi * (x + kCubic * x * x * x));
}

__global__ void __launch_bounds__(kThreads)
    BiasGeluKernel(int64_t elements, int64_t columns, const float* __restrict__ product,
                   const BFloat16Bits* __restrict__ bias, BFloat16Bits* __restrict__ aux,
                   BFloat16Bits* __restrict__ out) {
  const int64_t i = ThreadOfGrid();
  if (i >= elements) return;
  const float x = product[i] + FromBFloat16(bias[i % columns]);
  aux[i] = ToBFloat16(x);
  out[i] = ToBFloat16(0.5f * x * (1 + Tanh(x)));
}

__global__ void __launch_bounds__(kThreads)
    GeluBackwardKernel(int64_t elements, const float* __restrict__ product,
                       const BFloat16Bits* __restrict__ aux, BFloat16Bits* __restrict__ out) {
  const int64_t i = ThreadOfGrid();
  if (i >= elements) return;
  const float x = FromBFloat16(aux[i]);
  const float t = Tanh(x);
  const float inner = kSqrt2OverPi * (1 + 3 * kCubic * x * x);
  out[i] = ToBFloat16(product[i] * (0.5f * (1 + t) + 0.5f * x * (1 - t * t) * inner));
}

}  // namespace

absl::Status BiasGelu(DeviceStream& stream, int64_t rows, int64_t columns, const float* product,
                      const BFloat16Bits* bias, BFloat16Bits* aux, BFloat16Bits* out) {
  return Launch(stream, "gelu", GridFor(rows * columns, kThreads), &BiasGeluKernel, rows * columns,
                columns, product, bias, aux, out);
}

absl::Status GeluBackward(DeviceStream& stream, int64_t elements, const float* product,
                          const BFloat16Bits* aux, BFloat16Bits* out) {
  return Launch(stream, "gelu backward", GridFor(elements, kThreads), &GeluBackwardKernel, elements,
                product, aux, out);
}

}  // namespace ballast::worker::cuda
