#include "gpu_worker/gpt/architecture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tests/support/messages.h"

namespace ballast::worker::architecture_test {
namespace {

using testing::ElementsAre;

constexpr GptConfig kTiny{.layers = 3, .heads = 2, .width = 8, .context = 6};

GptConfig Named(absl::string_view name) { return FindGptConfig(name).value(); }

int64_t CountElements(const GptConfig& config) {
  int64_t elements = 0;
  for (const ModelParameter& parameter : GptParameters(config)) elements += parameter.elements();
  return elements;
}

std::vector<float> Values(const GptConfig& config, uint64_t seed, int parameter, int64_t offset,
                          int64_t elements) {
  std::vector<float> values(elements, -1.0f);
  GptInitialValues(config, seed, parameter, offset, absl::MakeSpan(values));
  return values;
}

std::vector<float> AllValues(const GptConfig& config, uint64_t seed, int parameter) {
  return Values(config, seed, parameter, 0, GptParameters(config)[parameter].elements());
}

// FNV-1a over the bits of all parameters' first values, in order.
uint64_t HashOfFirstValues(const GptConfig& config, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t p = 0; p < GptParameters(config).size(); ++p) {
    for (const float value : AllValues(config, seed, p)) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      hash = (hash ^ bits) * 0x100000001b3;
    }
  }
  return hash;
}

TEST(GptConfig, NamedOnesHaveTheParameterCountsOfGpt2) {
  // Embeddings; in each block 12 width^2 of matrices, 9 width of biases and 4 of layer norms; the
  // last norm.
  const auto formula = [](int64_t layers, int64_t width, int64_t context, int64_t vocabulary) {
    return (vocabulary + context) * width + layers * (12 * width * width + 13 * width) + 2 * width;
  };
  EXPECT_EQ(CountElements(Named("gpt2-124M")), formula(12, 768, 1024, 50304));
  EXPECT_EQ(CountElements(Named("gpt2-350M")), formula(24, 1024, 1024, 50304));
  EXPECT_EQ(CountElements(Named("gpt2-774M")), formula(36, 1280, 1024, 50304));
  EXPECT_EQ(CountElements(Named("gpt2-1.5B")), formula(48, 1600, 1024, 50304));
  EXPECT_EQ(CountElements(Named("bytes")), 3257856);
  // Published: 124,439,808 with 50,257 tokens.
  EXPECT_EQ(CountElements(Named("gpt2-124M")) - (50304 - 50257) * 768, 124439808);
}

TEST(GptConfig, NamedOnesWork) {
  for (const char* name : {"bytes", "gpt2-124M", "gpt2-350M", "gpt2-774M", "gpt2-1.5B"}) {
    EXPECT_TRUE(Validate(Named(name)).ok()) << name;
    EXPECT_EQ(Named(name).width / Named(name).heads, 64) << name;
  }
  EXPECT_EQ(Named("bytes"), GptConfig{});
}

TEST(GptConfig, AnUnknownNameIsAnsweredWithTheKnownOnes) {
  const absl::Status status = FindGptConfig("gpt2-124m").status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kInvalidArgument));
}

TEST(GptConfig, RefusesWhatCannotWork) {
  EXPECT_TRUE(Validate(kTiny).ok());
  EXPECT_TRUE(Refused(Validate({.layers = 0}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Validate({.context = (1 << 14) + 1}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Validate({.vocabulary = 0}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Validate({.heads = 3, .width = 8}), absl::StatusCode::kInvalidArgument));
}

TEST(GptParameters, AreGpt2sAndStandWhereTheIndicesSay) {
  const std::vector<ModelParameter> parameters = GptParameters(kTiny);
  EXPECT_EQ(parameters.size(), 2 + 3 * 12 + 2);
  EXPECT_EQ(parameters[kTokenEmbedding].name, "wte");
  EXPECT_THAT(parameters[kTokenEmbedding].shape, ElementsAre(256, 8));
  EXPECT_EQ(parameters[kPositionEmbedding].name, "wpe");
  EXPECT_THAT(parameters[kPositionEmbedding].shape, ElementsAre(6, 8));
  EXPECT_EQ(parameters[BlockParameter(0, kNorm1Weight)].name, "h.0.ln_1.weight");
  EXPECT_EQ(parameters[BlockParameter(1, kQkvWeight)].name, "h.1.attn.c_attn.weight");
  EXPECT_THAT(parameters[BlockParameter(1, kQkvWeight)].shape, ElementsAre(24, 8));
  EXPECT_EQ(parameters[BlockParameter(1, kAttentionOutBias)].name, "h.1.attn.c_proj.bias");
  EXPECT_EQ(parameters[BlockParameter(2, kHiddenWeight)].name, "h.2.mlp.c_fc.weight");
  EXPECT_EQ(parameters[BlockParameter(2, kMlpOutWeight)].name, "h.2.mlp.c_proj.weight");
  EXPECT_THAT(parameters[BlockParameter(2, kMlpOutWeight)].shape, ElementsAre(8, 32));
  EXPECT_EQ(parameters[LastNormWeight(kTiny)].name, "ln_f.weight");
  for (const ModelParameter& parameter : parameters) {
    EXPECT_EQ(parameter.decay, parameter.shape.size() == 2) << parameter.name;
  }
}

TEST(GptBackwardOrder, HasEveryParameterOnceLastLayersFirst) {
  const std::vector<int> order = GptBackwardOrder(kTiny);
  EXPECT_EQ(order.front(), LastNormWeight(kTiny));
  EXPECT_EQ(order[2], BlockParameter(2, kMlpOutWeight));
  EXPECT_EQ(order[3], BlockParameter(2, kMlpOutBias));
  EXPECT_EQ(order[order.size() - 2], kPositionEmbedding);
  EXPECT_EQ(order.back(), kTokenEmbedding);
  std::vector<int> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int> all(GptParameters(kTiny).size());
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(sorted, all);
}

// Trainings go on from the weights that they began with: a changed value is another run.
TEST(GptInitialValues, AreTheBitsThatTheyAlwaysWere) {
  EXPECT_EQ(HashOfFirstValues(kTiny, 3), 0x4abf2a1f0eb7cb4c);
  EXPECT_EQ(HashOfFirstValues(kTiny, 4), 0x9f8647d98e8be53f);
}

TEST(GptInitialValues, AreAFunctionOfSeedAndPlace) {
  for (const int parameter : {kTokenEmbedding, BlockParameter(1, kMlpOutWeight)}) {
    const std::vector<float> whole = AllValues(kTiny, 1, parameter);
    EXPECT_NE(whole, AllValues(kTiny, 2, parameter));
    const std::vector<float> part = Values(kTiny, 1, parameter, 20, 10);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 20));
  }
}

TEST(GptInitialValues, BiasesAreZerosAndNormsOnes) {
  const std::vector<ModelParameter> parameters = GptParameters(kTiny);
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (parameters[p].shape.size() == 2) continue;
    const bool bias = parameters[p].name.ends_with(".bias");
    EXPECT_THAT(AllValues(kTiny, 1, p), testing::Each(bias ? 0.0f : 1.0f)) << parameters[p].name;
  }
}

}  // namespace
}  // namespace ballast::worker::architecture_test
