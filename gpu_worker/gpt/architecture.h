// GPT-2's architecture (Radford et al. 2019) as both backends compute it: configurations,
// parameters and their first values. Pre-layer norm, learned positions, the head tied to the token
// embedding.
#ifndef BALLAST_GPU_WORKER_GPT_ARCHITECTURE_H_
#define BALLAST_GPU_WORKER_GPT_ARCHITECTURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::worker {

inline constexpr int kByteVocabulary = 256;
// GPT-2's 50,257 tokens and 47 unused ones, so that matrices consist of whole tiles.
inline constexpr int kGpt2Vocabulary = 50304;

struct GptConfig {
  int layers = 4;
  int heads = 4;
  int width = 256;
  int context = 128;  // The longest sequence.
  int vocabulary = kByteVocabulary;

  bool operator==(const GptConfig&) const = default;
};

// "bytes" (the demo's), "gpt2-124M", "gpt2-350M", "gpt2-774M", "gpt2-1.5B". INVALID_ARGUMENT naming
// all of them.
absl::StatusOr<GptConfig> FindGptConfig(absl::string_view name);
// INVALID_ARGUMENT unless all are positive, within the range of int indices, and heads divide
// width.
absl::Status Validate(const GptConfig& config);

struct ModelParameter {
  std::string name;            // GPT-2's name, for example "h.0.attn.c_attn.weight".
  std::vector<int64_t> shape;  // A matrix: out, in.
  bool decay = true;           // Matrices and embeddings decay; biases and layer norms do not.
  bool embedding = false;

  int64_t elements() const;
};

// Indices of parameters: the embeddings, then kPerBlock for each block, then the last layer norm.
inline constexpr int kTokenEmbedding = 0;
inline constexpr int kPositionEmbedding = 1;
inline constexpr int kFirstBlock = 2;
enum InBlock {
  kNorm1Weight,
  kNorm1Bias,
  kQkvWeight,
  kQkvBias,
  kAttentionOutWeight,
  kAttentionOutBias,
  kNorm2Weight,
  kNorm2Bias,
  kHiddenWeight,
  kHiddenBias,
  kMlpOutWeight,
  kMlpOutBias,
  kPerBlock,
};
constexpr int BlockParameter(int layer, InBlock which) {
  return kFirstBlock + layer * kPerBlock + which;
}
constexpr int LastNormWeight(const GptConfig& config) {
  return BlockParameter(config.layers, kNorm1Weight);
}

std::vector<ModelParameter> GptParameters(const GptConfig& config);
// Every parameter by index, in the order in which a backward pass completes gradients.
std::vector<int> GptBackwardOrder(const GptConfig& config);
// First values of elements [offset, offset + values.size()) of a parameter: a function of the seed.
void GptInitialValues(const GptConfig& config, uint64_t seed, int parameter, int64_t offset,
                      absl::Span<float> values);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_GPT_ARCHITECTURE_H_
