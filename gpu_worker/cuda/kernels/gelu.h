// Gelu after a matrix product, for products that the library cannot combine with it
// (device/matmul.h has the formula).
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_GELU_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_GELU_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

// MatmulEpilogue::kBiasGelu of an fp32 product, rows x columns: each of the two is rounded once.
absl::Status BiasGelu(DeviceStream& stream, int64_t rows, int64_t columns, const float* product,
                      const BFloat16Bits* bias, BFloat16Bits* aux, BFloat16Bits* out);

// MatmulEpilogue::kGeluBackward of an fp32 product.
absl::Status GeluBackward(DeviceStream& stream, int64_t elements, const float* product,
                          const BFloat16Bits* aux, BFloat16Bits* out);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_GELU_H_
