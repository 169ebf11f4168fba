// The optimizer's arithmetic on the device, with the bits of common/rules/adam.h and
// common/gradient_norm.h.
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_ADAM_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_ADAM_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/rules/adam.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker::cuda {

// UpdateAdamReference, bit for bit (NaN payloads excepted); all pointers are on the device.
absl::Status UpdateAdam(DeviceStream& stream, const AdamRun& run);

// Adjacent blocks of a gradient. The last may be short.
struct BlockRun {
  const std::byte* gradient = nullptr;
  int64_t elements = 0;
  int64_t first_block = 0;  // The number of blocks in earlier runs.
  DType dtype = DType::kFloat32;
};
// sums[run.first_block + b] = BlockSumOfSquaresReference of block b of each run, bit for bit, all
// in one launch. `table` has the `runs` of them, on the device, and they have `blocks` blocks.
absl::Status BlockSumsOfSquares(DeviceStream& stream, int runs, const BlockRun* table,
                                int64_t blocks, double* sums);

// sum[i] = gradient[i] of `dtype` as fp32 if `assign`, or sum[i] + that.
absl::Status AddWireGradient(DeviceStream& stream, int64_t elements, const std::byte* gradient,
                             DType dtype, bool assign, float* sum);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_ADAM_H_
