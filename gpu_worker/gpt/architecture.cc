#include "gpu_worker/gpt/architecture.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/system/parallel_for.h"
#include "gpu_worker/base/random.h"

namespace ballast::worker {
namespace {

struct NamedConfig {
  absl::string_view name;
  GptConfig config;
};

constexpr int kGpt2Context = 1024;
// The numbers are layers, heads, width, context and vocabulary. After the demo come the four sizes
// that OpenAI published. A head has 64 features in all of them, which is one of the widths that the
// attention kernels have.
constexpr NamedConfig kNamedConfigs[] = {
    {"bytes", GptConfig{}},
    {"gpt2-124M", {12, 12, 768, kGpt2Context, kGpt2Vocabulary}},
    {"gpt2-350M", {24, 16, 1024, kGpt2Context, kGpt2Vocabulary}},
    {"gpt2-774M", {36, 20, 1280, kGpt2Context, kGpt2Vocabulary}},
    {"gpt2-1.5B", {48, 25, 1600, kGpt2Context, kGpt2Vocabulary}},
};

constexpr float kInitialDeviation = 0.02f;  // Matrices and token embeddings, as GPT-2.
// OpenAI's code of GPT-2 has this value (src/model.py).
constexpr float kInitialPositionDeviation = 0.01f;  // Position embeddings.

// The square root by Newton's method in double: no math library enters the first weights.
float InverseSquareRoot(int value) {
  double root = value;
  // That is far more rounds than needed: from the value itself the root is halved until it is near,
  // at most 8 times for the largest number of layers, and then its digits double.
  for (int i = 0; i < 64; ++i) root = 0.5 * (root + value / root);
  return static_cast<float>(1 / root);
}

enum class FirstValues { kZeros, kOnes, kRandom };

struct Kind {
  FirstValues values;
  float deviation = 0;  // For random values.
};

// The parameters of a block are pairs of weight and bias; so is the last layer norm.
Kind KindOf(const GptConfig& config, int parameter) {
  if (parameter == kTokenEmbedding) return {FirstValues::kRandom, kInitialDeviation};
  if (parameter == kPositionEmbedding) return {FirstValues::kRandom, kInitialPositionDeviation};
  const int in_block = (parameter - kFirstBlock) % kPerBlock;
  if (in_block % 2 == 1) return {FirstValues::kZeros};
  switch (in_block) {
    case kNorm1Weight:
    case kNorm2Weight:
      return {FirstValues::kOnes};
    case kAttentionOutWeight:
    case kMlpOutWeight:
      // What adds to the residual stream, twice a block (Radford et al. 2019, section 2.3).
      return {FirstValues::kRandom, kInitialDeviation * InverseSquareRoot(2 * config.layers)};
    default:
      return {FirstValues::kRandom, kInitialDeviation};
  }
}

}  // namespace

absl::StatusOr<GptConfig> FindGptConfig(absl::string_view name) {
  for (const NamedConfig& named : kNamedConfigs) {
    if (named.name == name) return named.config;
  }
  const auto append_name = [](std::string* to, const NamedConfig& named) {
    absl::StrAppend(to, named.name);
  };
  return absl::InvalidArgumentError(absl::StrCat("--model=", name, " must be one of ",
                                                 absl::StrJoin(kNamedConfigs, ", ", append_name)));
}

absl::Status Validate(const GptConfig& config) {
  // With these limits 4 * width * width and heads * context are at most 2^30, so code that
  // multiplies such sizes as ints cannot overflow. Sizes times tokens are checked where the tokens
  // are known.
  constexpr int kLargest = 1 << 14;
  constexpr int kLargestVocabulary = 1 << 18;
  struct Limit {
    absl::string_view name;
    int value;
    int largest;
  };
  for (const Limit& limit : {Limit{"layers", config.layers, kLargest},
                             {"heads", config.heads, kLargest},
                             {"width", config.width, kLargest},
                             {"context", config.context, kLargest},
                             {"vocabulary", config.vocabulary, kLargestVocabulary}}) {
    if (limit.value < 1 || limit.value > limit.largest) {
      return absl::InvalidArgumentError(absl::StrCat("--", limit.name, "=", limit.value,
                                                     " must be between 1 and ", limit.largest));
    }
  }
  if (config.width % config.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--width=", config.width, " must be a multiple of --heads=", config.heads));
  }
  return absl::OkStatus();
}

int64_t ModelParameter::elements() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

std::vector<ModelParameter> GptParameters(const GptConfig& config) {
  const int64_t width = config.width;
  std::vector<ModelParameter> parameters;
  const auto add = [&](std::string name, std::vector<int64_t> shape) {
    const bool decay = shape.size() > 1;
    const bool embedding = parameters.size() <= kPositionEmbedding;
    parameters.push_back({std::move(name), std::move(shape), decay, embedding});
  };
  add("wte", {config.vocabulary, width});
  add("wpe", {config.context, width});
  for (int layer = 0; layer < config.layers; ++layer) {
    const std::string h = absl::StrCat("h.", layer, ".");
    add(h + "ln_1.weight", {width});
    add(h + "ln_1.bias", {width});
    add(h + "attn.c_attn.weight", {3 * width, width});
    add(h + "attn.c_attn.bias", {3 * width});
    add(h + "attn.c_proj.weight", {width, width});
    add(h + "attn.c_proj.bias", {width});
    add(h + "ln_2.weight", {width});
    add(h + "ln_2.bias", {width});
    add(h + "mlp.c_fc.weight", {4 * width, width});
    add(h + "mlp.c_fc.bias", {4 * width});
    add(h + "mlp.c_proj.weight", {width, 4 * width});
    add(h + "mlp.c_proj.bias", {width});
  }
  add("ln_f.weight", {width});
  add("ln_f.bias", {width});
  return parameters;
}

// Layers complete weight and bias together, last layer first; the embeddings are last.
std::vector<int> GptBackwardOrder(const GptConfig& config) {
  std::vector<int> order;
  for (int weight = LastNormWeight(config); weight >= kFirstBlock; weight -= 2) {
    order.push_back(weight);
    order.push_back(weight + 1);
  }
  // The token embedding is last although the head, which is the same parameter, comes first in
  // backward: its gradient is complete when both have added their parts.
  order.push_back(kPositionEmbedding);
  order.push_back(kTokenEmbedding);
  return order;
}

void GptInitialValues(const GptConfig& config, uint64_t seed, int parameter, int64_t offset,
                      absl::Span<float> values) {
  const Kind kind = KindOf(config, parameter);
  switch (kind.values) {
    case FirstValues::kZeros:
      std::fill(values.begin(), values.end(), 0.0f);
      return;
    case FirstValues::kOnes:
      std::fill(values.begin(), values.end(), 1.0f);
      return;
    case FirstValues::kRandom: {
      constexpr int64_t kTogether = 1 << 13;
      const auto size = static_cast<int64_t>(values.size());
      // Each value is a function of its place in the parameter. So it does not matter how chunks,
      // ranks or threads cut the parameter.
      ParallelFor(DivideUp(size, kTogether), [&](int64_t task) {
        const int64_t end = std::min(size, (task + 1) * kTogether);
        for (int64_t i = task * kTogether; i < end; ++i) {
          values[i] = kind.deviation * RandomNormal(seed, parameter, offset + i);
        }
      });
    }
  }
}

}  // namespace ballast::worker
