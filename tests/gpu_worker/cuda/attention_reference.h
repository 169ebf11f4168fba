// Attention in double, by its definition, and how far from it the kernels may be.
#ifndef BALLAST_TESTS_GPU_WORKER_CUDA_ATTENTION_REFERENCE_H_
#define BALLAST_TESTS_GPU_WORKER_CUDA_ATTENTION_REFERENCE_H_

#include <vector>

#include "gpu_worker/cuda/kernels/attention.h"

namespace ballast::worker::cuda {

// Values, and for each the largest error that comes of rounding to bf16 where the kernels do
// (probabilities and the gradients of scores, before they are multiplied; results), and of sums in
// fp32. To first order: all bounds are far below 1.
struct Bounded {
  std::vector<double> values;
  std::vector<double> bounds;
};

struct AttentionForwardReference {
  Bounded out;
  Bounded logsumexp;
};
AttentionForwardReference ReferenceForward(const AttentionShape& shape,
                                           const std::vector<BFloat16Bits>& qkv);

// d_qkv, where `out` and `logsumexp` are what backward is given.
Bounded ReferenceBackward(const AttentionShape& shape, const std::vector<BFloat16Bits>& qkv,
                          const std::vector<BFloat16Bits>& out, const std::vector<float>& logsumexp,
                          const std::vector<BFloat16Bits>& d_out);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_WORKER_CUDA_ATTENTION_REFERENCE_H_
