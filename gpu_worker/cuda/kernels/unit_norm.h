// A matrix of norm 1, with which Newton-Schulz begins.
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_UNIT_NORM_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_UNIT_NORM_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

// The elements of `sums` that DivideByNorm may use.
inline constexpr unsigned kNormSums = 256;

// x[i] = x[i] / max(norm, eps), each of the three in bf16, as torch.optim.Muon has it; norm =
// sqrt(sum of x[i] * x[i]), in double. `sums` is on the device; its contents mean nothing.
absl::Status DivideByNorm(DeviceStream& stream, int64_t elements, float eps, BFloat16Bits* x,
                          double* sums);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_UNIT_NORM_H_
