// Token and position embeddings. Tensors are row-major; tokens are rows, sequence after sequence.
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_EMBEDDING_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_EMBEDDING_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

struct EmbeddingShape {
  int sequences = 0;
  int context = 0;  // Tokens of each.
  int width = 0;
  constexpr int64_t rows() const { return int64_t{sequences} * context; }
};

// out[row] = token_weights[tokens[row]] + position_weights[row % context], rounded once.
absl::Status EmbeddingForward(DeviceStream& stream, const EmbeddingShape& shape,
                              const int32_t* tokens, const BFloat16Bits* token_weights,
                              const BFloat16Bits* position_weights, BFloat16Bits* out);

// The rows of each token of a batch, so that their gradients are added in one order: the rows of
// tokens[t], in increasing order, are rows[begins[t]] ... rows[begins[t + 1] - 1].
struct TokenRows {
  std::vector<int32_t> tokens;  // Each once, in increasing order.
  std::vector<int32_t> begins;  // tokens.size() + 1 of them.
  std::vector<int32_t> rows;
};
// By counting; tokens are not negative.
TokenRows GroupByToken(absl::Span<const int32_t> tokens);

// On the device.
struct TokenRowsOnDevice {
  int distinct_tokens = 0;
  const int32_t* tokens = nullptr;
  const int32_t* begins = nullptr;
  const int32_t* rows = nullptr;
};

// token_gradient[t] += sum of d_out[row] over the rows of token t, in order of row, in fp32;
// position_gradient[p] = sum over sequences of d_out[sequence * context + p], or += if
// `add_positions`.
// `token_gradient` has one row for each token of the vocabulary, `position_gradient` `context`
// rows.
absl::Status EmbeddingBackward(DeviceStream& stream, const EmbeddingShape& shape,
                               const TokenRowsOnDevice& token_rows, const BFloat16Bits* d_out,
                               float* token_gradient, float* position_gradient, bool add_positions);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_EMBEDDING_H_
