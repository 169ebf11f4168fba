// The optimizer's arithmetic on the device, with the bits of common/adam.h and
// common/gradient_norm.h.
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_ADAM_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_ADAM_H_

#include <cstdint>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker::cuda {

// UpdateAdamReference, bit for bit (NaN payloads excepted); all pointers are on the device.
absl::Status UpdateAdam(DeviceStream& stream, const AdamRun& run);

// sums[b] = BlockSumOfSquaresReference(gradient + b * kBlockElements), for `blocks` whole blocks of
// fp32; bit for bit.
absl::Status BlockSumsOfSquares(DeviceStream& stream, int64_t blocks, const float* gradient,
                                double* sums);

// sum[i] = gradient[i] of `dtype` as fp32 if `assign`, or sum[i] + that.
absl::Status AddWireGradient(DeviceStream& stream, int64_t elements, const std::byte* gradient,
                             DType dtype, bool assign, float* sum);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_ADAM_H_
