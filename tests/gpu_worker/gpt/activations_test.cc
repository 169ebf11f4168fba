#include "gpu_worker/gpt/activations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/reason.h"
#include "gpu_worker/cuda/kernels/attention.h"
#include "gpu_worker/cuda/kernels/layer_norm.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;

constexpr GptConfig kConfig{
    .layers = 3, .heads = 2, .width = 128, .context = 48, .vocabulary = 256};
constexpr int kSequences = 5;
constexpr int64_t kRows = int64_t{kSequences} * kConfig.context;

struct Tensor {
  const std::byte* begin = nullptr;
  int64_t bytes = 0;
};

// All tensors, with the sizes that activations.h gives them.
std::vector<Tensor> TensorsOf(const Activations& activations) {
  std::vector<Tensor> tensors;
  const auto add = [&](const auto* tensor, int64_t columns) {
    tensors.push_back({reinterpret_cast<const std::byte*>(tensor),
                       kRows * columns * static_cast<int64_t>(sizeof(*tensor))});
  };
  const auto add_norm = [&](const NormActivations& norm) {
    add(norm.in, kConfig.width);
    add(norm.out, kConfig.width);
    add(norm.mean, 1);
    add(norm.rstd, 1);
  };
  for (const BlockActivations& block : activations.blocks) {
    add_norm(block.norm_1);
    add(block.qkv, 3 * kConfig.width);
    add(block.attended, kConfig.width);
    add(block.logsumexp, kConfig.heads);
    add_norm(block.norm_2);
    add(block.hidden, 4 * kConfig.width);
    add(block.activated, 4 * kConfig.width);
  }
  add_norm(activations.last_norm);
  add(activations.logits, kConfig.vocabulary);
  add(activations.losses, 1);
  add(activations.branch, kConfig.width);
  add(activations.d_stream, kConfig.width);
  add(activations.d_wide, 4 * kConfig.width);
  tensors.push_back({reinterpret_cast<const std::byte*>(activations.scratch),
                     static_cast<int64_t>(ScratchBytes(kConfig, kSequences, kConfig.context))});
  return tensors;
}

TEST(Activations, EachTensorHasMemoryOfItsOwnAndOfItsSize) {
  FakeDevice device;
  const auto stream = device.CreateStream("compute").value();
  const Activations activations = AllocateActivations(device, kConfig, kSequences).value();
  ASSERT_EQ(activations.blocks.size(), kConfig.layers);
  std::vector<Tensor> tensors = TensorsOf(activations);
  std::sort(tensors.begin(), tensors.end(),
            [](const Tensor& a, const Tensor& b) { return a.begin < b.begin; });
  int64_t all = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    ASSERT_NE(tensors[i].begin, nullptr);
    // The device aborts where that is not within one piece of its memory.
    EXPECT_TRUE(stream->Zero(const_cast<std::byte*>(tensors[i].begin), tensors[i].bytes).ok());
    if (i > 0) EXPECT_LE(tensors[i - 1].begin + tensors[i - 1].bytes, tensors[i].begin);
    all += tensors[i].bytes;
  }
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(activations.bytes, all);
  EXPECT_EQ(device.allocated_bytes(), all);
}

TEST(Activations, WhatDoesNotFitIsSaidWithItsSizesAndNothingIsKept) {
  constexpr GptConfig kLarge{.layers = 12, .heads = 12, .width = 768, .context = 1024};
  // Bytes of a token: twelve blocks, the last layer norm, and what there is once.
  constexpr int64_t kNorm = 2 * 768 * 2 + 2 * 4;
  constexpr int64_t kBlock = 2 * kNorm + (3 + 1 + 4 + 4) * 768 * 2 + 12 * 4;
  constexpr int64_t kToken = 12 * kBlock + kNorm + 256 * 2 + 4 + (1 + 1 + 4) * 768 * 2;
  const double all = 4 * 1024 * kToken + static_cast<double>(ScratchBytes(kLarge, 4, 1024));
  FakeDevice device({.memory_bytes = 64 << 20});  // Some tensors fit.
  const absl::Status status = AllocateActivations(device, kLarge, 4).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kResourceExhausted, reason::kDeviceMemoryFull));
  EXPECT_THAT(status.message(), HasSubstr(absl::StrFormat("%.2f GiB", all / (1 << 30))));
  EXPECT_GT(device.most_allocated_bytes(), 0);
  EXPECT_EQ(device.allocated_bytes(), 0);
}

TEST(Activations, AnotherErrorOfTheDeviceIsPassedOnAsItIs) {
  const absl::Status lost = absl::UnavailableError("GPU 0 is lost");
  FakeDevice device({.fail = [&](absl::string_view operation, absl::string_view) {
    return operation == "allocate" ? lost : absl::OkStatus();
  }});
  EXPECT_EQ(AllocateActivations(device, kConfig, kSequences).status(), lost);
}

// The model has scratch for the largest pass, and gives smaller ones too.
TEST(ScratchBytes, DoForEveryKernelOfAPassAndOfEverySmallerOne) {
  for (const GptConfig& config :
       {kConfig, GptConfig{.layers = 1, .heads = 1, .width = 64, .context = 130},
        GptConfig{.layers = 1, .heads = 2, .width = 128, .context = 30000}}) {
    const size_t most = ScratchBytes(config, kSequences, config.context);
    for (int sequences = 1; sequences <= kSequences; ++sequences) {
      for (int context = 1; context <= config.context; context += 1 + context / 64) {
        const size_t bytes = ScratchBytes(config, sequences, context);
        const int64_t rows = int64_t{sequences} * context;
        ASSERT_LE(bytes, most) << sequences << " of " << context;
        ASSERT_GE(bytes, cuda::AttentionScratchBytes({.sequences = sequences,
                                                      .context = context,
                                                      .width = config.width,
                                                      .heads = config.heads}));
        ASSERT_GE(bytes, cuda::LayerNormScratchBytes({.rows = rows, .width = config.width}));
        for (const int wide : {1, 3, 4}) {  // Biases of a projection, of qkv and of the MLP.
          ASSERT_GE(bytes, cuda::ColumnSumScratchBytes(rows, wide * config.width));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::worker
