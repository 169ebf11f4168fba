// A DeviceGpt with its weights and gradients on a device, for tests that want to see them.
#ifndef BALLAST_TESTS_GPU_WORKER_GPT_MODEL_ON_DEVICE_H_
#define BALLAST_TESTS_GPU_WORKER_GPT_MODEL_ON_DEVICE_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/base/data.h"
#include "gpu_worker/base/random.h"
#include "gpu_worker/gpt/architecture.h"
#include "gpu_worker/gpt/device_gpt.h"

namespace ballast::worker {

inline void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

// Two groups, as training has them, for a world of one.
inline Layout LayoutOf(const GptConfig& config) {
  LayoutSpec spec{.group_count = 2, .parameters = {}, .partitions = {}};
  for (const ModelParameter& parameter : GptParameters(config)) {
    spec.parameters.push_back(
        {.name = parameter.name, .shape = parameter.shape, .group = parameter.decay ? 0 : 1});
  }
  const std::vector<int64_t> elements = FlatElements(spec);
  for (int group = 0; group < spec.group_count; ++group) {
    spec.partitions.push_back({.group = group, .begin = 0, .end = elements[group]});
  }
  return Layout::Create(std::move(spec)).value();
}

// All random, biases and layer norms included, so that no term of a gradient hides behind a zero,
// and of the size that keeps activations near one.
inline std::vector<uint16_t> SomeWeights(const GptConfig& config, int parameter) {
  const ModelParameter described = GptParameters(config)[parameter];
  std::vector<uint16_t> weights(described.elements());
  const bool norm = described.shape.size() == 1 && described.name.find("ln_") != std::string::npos;
  const float mean = norm && described.name.ends_with("weight") ? 1 : 0;
  const float deviation =
      described.shape.size() == 1 ? 0.3f : 1 / std::sqrt(static_cast<float>(described.shape[1]));
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = FloatToBFloat16(mean + deviation * RandomNormal(5, parameter, i));
  }
  return weights;
}

inline Batch SomeBatch(const GptConfig& config, int sequences, int context, uint64_t seed = 9) {
  Batch batch{.sequences = sequences, .context = context, .inputs = {}, .targets = {}};
  for (int i = 0; i < sequences * context; ++i) {
    // Many rows have the same token, and some tokens have none.
    const uint64_t tokens = i % 2 == 0 ? 5 : config.vocabulary;
    batch.inputs.push_back(static_cast<int32_t>(RandomBits(seed, 1, i) % tokens));
    batch.targets.push_back(static_cast<int32_t>(RandomBits(seed, 2, i) % config.vocabulary));
  }
  return batch;
}

// What a pass left, by parameter.
struct PassResult {
  double loss = 0;
  std::vector<std::vector<float>> gradients;

  // From the same bits.
  bool operator==(const PassResult& other) const {
    if (std::memcmp(&loss, &other.loss, sizeof(loss)) != 0) return false;
    for (size_t p = 0; p < gradients.size(); ++p) {
      if (gradients[p].size() != other.gradients[p].size()) return false;
      if (std::memcmp(gradients[p].data(), other.gradients[p].data(),
                      gradients[p].size() * sizeof(float)) != 0) {
        return false;
      }
    }
    return true;
  }
};

class ModelOnDevice {
 public:
  // Borrows all of `parts`. Weights are SomeWeights, gradients NaN.
  ModelOnDevice(const GptConfig& config, const DeviceGptParts& parts, int sequences)
      : config_(config),
        parts_(parts),
        layout_(LayoutOf(config)),
        loss_(parts.device.Allocate(sizeof(double), "loss").value()),
        model_(DeviceGpt::Create(config, parts, sequences).value()) {
    DeviceFlatSpaces spaces;
    for (int group = 0; group < layout_.group_count(); ++group) {
      const int64_t elements = layout_.flat_elements(group);
      weights_.push_back(parts.device.Allocate(elements * sizeof(uint16_t), "weights").value());
      gradients_.push_back(parts.device.Allocate(elements * sizeof(float), "gradients").value());
      spaces.weights.push_back(weights_.back()->as<uint16_t>());
      spaces.gradients.push_back(gradients_.back()->as<float>());
    }
    model_->Place(layout_, spaces);
    for (int p = 0; p < parameters(); ++p) SetWeights(p, SomeWeights(config, p));
    PoisonGradients();
  }

  DeviceGpt& model() { return *model_; }
  const GptConfig& config() const { return config_; }
  int parameters() const { return static_cast<int>(layout_.spec().parameters.size()); }

  uint16_t* WeightsAt(int p) const {
    return weights_[Group(p)]->as<uint16_t>() + layout_.place(p).offset;
  }
  float* GradientAt(int p) const {
    return gradients_[Group(p)]->as<float>() + layout_.place(p).offset;
  }
  int64_t Elements(int p) const { return layout_.place(p).elements; }
  double* loss() const { return loss_->as<double>(); }

  void SetWeights(int p, const std::vector<uint16_t>& weights) {
    CopyIn(WeightsAt(p), weights.data(), weights.size() * sizeof(uint16_t));
  }
  void PoisonWeights() {
    for (int p = 0; p < parameters(); ++p) {
      SetWeights(p, std::vector<uint16_t>(Elements(p), FloatToBFloat16(NAN)));
    }
  }
  void PoisonGradients() {
    for (int p = 0; p < parameters(); ++p) {
      const std::vector<float> poison(Elements(p), NAN);
      CopyIn(GradientAt(p), poison.data(), poison.size() * sizeof(float));
    }
  }

  PassResult Pass(const Batch& batch, double loss_scale = 1) {
    ExpectOk(model_->ForwardBackward(batch, {.loss_scale = loss_scale}, loss(), {}));
    return Result();
  }
  PassResult Result() {
    PassResult result;
    CopyOut(&result.loss, loss(), sizeof(double));
    for (int p = 0; p < parameters(); ++p) {
      std::vector<float>& gradient = result.gradients.emplace_back(Elements(p));
      CopyOut(gradient.data(), GradientAt(p), gradient.size() * sizeof(float));
    }
    return result;
  }

 private:
  int Group(int p) const { return layout_.spec().parameters[p].group; }
  void CopyIn(void* to, const void* from, size_t size_bytes) {
    ExpectOk(parts_.compute.CopyToDevice(to, {static_cast<const std::byte*>(from), size_bytes}));
    ExpectOk(parts_.compute.Synchronize());
  }
  void CopyOut(void* to, const void* from, size_t size_bytes) {
    ExpectOk(parts_.compute.CopyToHost({static_cast<std::byte*>(to), size_bytes}, from));
    ExpectOk(parts_.compute.Synchronize());
  }

  const GptConfig config_;
  const DeviceGptParts parts_;
  const Layout layout_;
  std::vector<std::unique_ptr<DeviceMemory>> weights_, gradients_;
  const std::unique_ptr<DeviceMemory> loss_;
  const std::unique_ptr<DeviceGpt> model_;  // Last: its destructor waits for passes.
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_GPT_MODEL_ON_DEVICE_H_
