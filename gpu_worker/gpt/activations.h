// What a pass on the device keeps between forward and backward, and its scratch. Tensors are
// row-major; a row is a token, sequence after sequence.
#ifndef BALLAST_GPU_WORKER_GPT_ACTIVATIONS_H_
#define BALLAST_GPU_WORKER_GPT_ACTIVATIONS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"
#include "gpu_worker/gpt/architecture.h"

namespace ballast::worker {

struct NormActivations {
  BFloat16Bits* in = nullptr;   // width; the residual stream at this point.
  BFloat16Bits* out = nullptr;  // width
  float* mean = nullptr;        // One a row, like rstd.
  float* rstd = nullptr;
};

struct BlockActivations {
  NormActivations norm_1;
  BFloat16Bits* qkv = nullptr;       // 3 width
  BFloat16Bits* attended = nullptr;  // width
  float* logsumexp = nullptr;        // heads
  NormActivations norm_2;
  BFloat16Bits* hidden = nullptr;     // 4 width; before gelu.
  BFloat16Bits* activated = nullptr;  // 4 width; after.
};

// Belongs to the device's work until that is done; destroyed after it.
struct Activations {
  std::vector<BlockActivations> blocks;
  NormActivations last_norm;
  BFloat16Bits* logits = nullptr;  // vocabulary; after cross-entropy their gradient.
  float* losses = nullptr;         // One a row.

  // In forward: what attention or the MLP adds to the residual stream. In backward: the gradient of
  // its input. width
  BFloat16Bits* branch = nullptr;
  BFloat16Bits* d_stream = nullptr;  // Gradient of the residual stream. width
  BFloat16Bits* d_wide = nullptr;    // Gradients of hidden, and of qkv. 4 width
  float* scratch = nullptr;          // For kernels, ScratchBytes of it.

  int64_t bytes = 0;
  std::vector<std::unique_ptr<DeviceMemory>> memory;
};

// For `sequences` sequences of the full context. RESOURCE_EXHAUSTED with the sizes and what to make
// smaller.
absl::StatusOr<Activations> AllocateActivations(Device& device, const GptConfig& config,
                                                int sequences);

// What kernels need for a pass over `sequences` sequences of `context` tokens.
size_t ScratchBytes(const GptConfig& config, int sequences, int context);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_GPT_ACTIVATIONS_H_
