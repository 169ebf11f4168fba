// Cross-entropy over the vocabulary, and its gradient, in one pass over the logits.
//
//   loss[row]         = log(sum over v of exp(logits[row][v])) - logits[row][target[row]]
//   logits[row][v]    becomes (exp(logits[row][v]) / that sum - (v == target[row])) * scale
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_CROSS_ENTROPY_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_CROSS_ENTROPY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

// `logits`: rows x vocabulary, bf16, read and then overwritten with their gradient. `losses`: one
// fp32 a row, in nats.
absl::Status CrossEntropy(DeviceStream& stream, int64_t rows, int vocabulary,
                          const int32_t* targets, float scale, BFloat16Bits* logits, float* losses);

// *sum (+)= the losses, in double and a fixed order; `add` false: assigned.
absl::Status SumLosses(DeviceStream& stream, int64_t rows, const float* losses, bool add,
                       double* sum);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_CROSS_ENTROPY_H_
