// Causal self-attention of all heads, fused: no context x context matrix is ever in memory.
//
//   s[i][j] = q[i] . k[j] / sqrt(head_width)      for j <= i
//   p[i]    = softmax(s[i])
//   out[i]  = sum over j of p[i][j] v[j]          Vaswani et al. 2017; tiled as Dao 2023
//
// Products of bf16 are summed in fp32 on tensor cores; softmax is fp32. Sums go in one fixed order,
// and there are no atomics: backward goes over the tiles twice, once for dk and dv, once for dq.
//
// Tensors of bf16 begin at multiples of 16 bytes; results overlap nothing else.
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

struct AttentionShape {
  int sequences = 0;
  int context = 0;  // Any length of at least 1.
  int width = 0;    // heads * head width.
  int heads = 0;
  int64_t rows() const { return int64_t{sequences} * context; }
};

// INVALID_ARGUMENT, saying what to change, unless the head width is 64 or 128 (GPT-2's is 64).
absl::Status ValidateAttention(const AttentionShape& shape);

// `qkv`: rows x 3 width, q then k then v, each head after head. `out`: rows x width. `logsumexp`:
// sequences x heads x context, fp32, log(sum over j of exp(s[i][j])), kept for backward.
absl::Status AttentionForward(DeviceStream& stream, const AttentionShape& shape,
                              const BFloat16Bits* qkv, BFloat16Bits* out, float* logsumexp);

// `d_qkv` is written, in the shape of `qkv`. `scratch`: AttentionScratchBytes of it.
size_t AttentionScratchBytes(const AttentionShape& shape);
absl::Status AttentionBackward(DeviceStream& stream, const AttentionShape& shape,
                               const BFloat16Bits* qkv, const BFloat16Bits* out,
                               const float* logsumexp, const BFloat16Bits* d_out,
                               BFloat16Bits* d_qkv, float* scratch);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_H_
