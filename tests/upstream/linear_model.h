// A model small enough to differentiate by hand: square layers with biases, one after another.
#ifndef BALLAST_TESTS_UPSTREAM_LINEAR_MODEL_H_
#define BALLAST_TESTS_UPSTREAM_LINEAR_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/layout.h"
#include "tests/client/session/reference_run.h"
#include "tests/upstream/tensors.h"

namespace ballast {

struct Sample {
  std::vector<float> input;
  std::vector<float> target;
};

// Parameter 2 * layer is a layer's weight [width, width], parameter 2 * layer + 1 its bias [width].
class LinearModel {
 public:
  LinearModel(int layers, int width) : layers_(layers), width_(width) {}

  // Each layer is a group of its own, so that ranks can own one each.
  std::vector<ParameterSpec> Parameters() const {
    std::vector<ParameterSpec> parameters;
    for (int layer = 0; layer < layers_; ++layer) {
      const std::string name = "layer" + std::to_string(layer);
      parameters.push_back({.name = name + ".weight", .shape = {width_, width_}, .group = layer});
      parameters.push_back({.name = name + ".bias", .shape = {width_}, .group = layer});
    }
    return parameters;
  }
  Tensors FirstWeights() const {
    Tensors weights;
    for (int layer = 0; layer < layers_; ++layer) {
      for (int i = 0; i < width_ * width_; ++i) {
        weights[2 * layer].push_back(0.5f * client::Random(1, layer, 0, i));
      }
      for (int i = 0; i < width_; ++i) {
        weights[2 * layer + 1].push_back(0.5f * client::Random(1, layer, 1, i));
      }
    }
    return weights;
  }
  // Number `index` of a data set: its target is a fixed function of its input.
  Sample MakeSample(uint64_t index) const {
    Sample sample;
    for (int i = 0; i < width_; ++i) sample.input.push_back(client::Random(2, index, 0, i));
    for (int i = 0; i < width_; ++i) {
      sample.target.push_back(0.5f * sample.input[(i + 1) % width_] - sample.input[i] + 0.25f);
    }
    return sample;
  }
  std::vector<Sample> MakeSamples(uint64_t first, int count) const {
    std::vector<Sample> samples;
    for (int i = 0; i < count; ++i) samples.push_back(MakeSample(first + i));
    return samples;
  }

  // The layers of `path` in turn; the mean squared error over samples and outputs. Adds to
  // `gradients` those of the layers on the path, and touches no other.
  template <typename Real>
  Real Backward(const TensorsOf<Real>& weights, const std::vector<int>& path,
                absl::Span<const Sample> batch, TensorsOf<Real>& gradients) const {
    const Real scale = Real{1} / static_cast<Real>(batch.size() * width_);
    Real loss = 0;
    for (const Sample& sample : batch) {
      std::vector<std::vector<Real>> inputs = {{sample.input.begin(), sample.input.end()}};
      for (const int layer : path) inputs.push_back(Forward(weights, layer, inputs.back()));
      std::vector<Real> delta(width_);
      for (int i = 0; i < width_; ++i) {
        const Real error = inputs.back()[i] - static_cast<Real>(sample.target[i]);
        loss += error * error * scale;
        delta[i] = 2 * error * scale;
      }
      for (int at = static_cast<int>(path.size()) - 1; at >= 0; --at) {
        delta = BackwardLayer(weights, path[at], inputs[at], delta, gradients);
      }
    }
    return loss;
  }

 private:
  template <typename Real>
  std::vector<Real> Forward(const TensorsOf<Real>& weights, int layer,
                            const std::vector<Real>& input) const {
    std::vector<Real> output = weights.at(2 * layer + 1);
    for (int row = 0; row < width_; ++row) {
      for (int column = 0; column < width_; ++column) {
        output[row] += weights.at(2 * layer)[row * width_ + column] * input[column];
      }
    }
    return output;
  }
  template <typename Real>
  std::vector<Real> BackwardLayer(const TensorsOf<Real>& weights, int layer,
                                  const std::vector<Real>& input, const std::vector<Real>& delta,
                                  TensorsOf<Real>& gradients) const {
    std::vector<Real>& weight = gradients[2 * layer];
    std::vector<Real>& bias = gradients[2 * layer + 1];
    weight.resize(width_ * width_);
    bias.resize(width_);
    std::vector<Real> before(width_);
    for (int row = 0; row < width_; ++row) {
      bias[row] += delta[row];
      for (int column = 0; column < width_; ++column) {
        weight[row * width_ + column] += delta[row] * input[column];
        before[column] += weights.at(2 * layer)[row * width_ + column] * delta[row];
      }
    }
    return before;
  }

  const int layers_;
  const int width_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_UPSTREAM_LINEAR_MODEL_H_
