#include "gpu_worker/cpu/cpu_gpt.h"

#include <algorithm>
#include <type_traits>

#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "gpu_worker/cpu/attention.h"
#include "gpu_worker/cpu/cross_entropy.h"
#include "gpu_worker/cpu/embedding.h"
#include "gpu_worker/cpu/gelu.h"
#include "gpu_worker/cpu/layer_norm.h"
#include "gpu_worker/cpu/matmul.h"

namespace ballast::worker {

template <typename T>
CpuGpt<T>::CpuGpt(const GptConfig& config)
    : config_(config), backward_order_(GptBackwardOrder(config)), blocks_(config.layers) {}

template <typename T>
void CpuGpt<T>::Place(const Layout& layout, absl::Span<const int64_t> group_elements,
                      DType weights_dtype) {
  Check(places_.empty(), "a model is placed once");
  Check(layout.spec().parameters.size() == backward_order_.size(), "the layout is of this model");
  weights_dtype_ = weights_dtype;
  flat_spaces_.resize(group_elements.size());
  for (size_t group = 0; group < group_elements.size(); ++group) {
    Check(group_elements[group] >= layout.flat_elements(group), "a flat space has its memory");
    flat_spaces_[group].weights.assign(group_elements[group] * SizeBytes(weights_dtype),
                                       std::byte{0});
    flat_spaces_[group].gradients.assign(group_elements[group], 0.0f);
  }
  working_weights_.resize(backward_order_.size());
  working_gradients_.resize(backward_order_.size());
  for (size_t i = 0; i < backward_order_.size(); ++i) {
    const ParameterPlace& place = layout.place(i);
    places_.push_back({layout.spec().parameters[i].group, place.offset, place.elements});
    working_weights_[i].resize(place.elements);
    // With T = float the layers write gradients straight to the flat space that is reduced.
    if constexpr (!std::is_same_v<T, float>) working_gradients_[i].resize(place.elements);
  }
}

template <typename T>
T* CpuGpt<T>::Gradient(int parameter) {
  if constexpr (std::is_same_v<T, float>) {
    const PlaceInGroup& place = places_[parameter];
    return flat_spaces_[place.group].gradients.data() + place.offset;
  } else {
    return working_gradients_[parameter].data();
  }
}

template <typename T>
void CpuGpt<T>::Announce(int parameter) {
  // This is the last moment for the copy: after the announcement the elements belong to the
  // reducer, whose thread may read them at once.
  if constexpr (!std::is_same_v<T, float>) {
    const PlaceInGroup& place = places_[parameter];
    std::copy(working_gradients_[parameter].begin(), working_gradients_[parameter].end(),
              flat_spaces_[place.group].gradients.begin() + place.offset);
  }
  (*gradient_ready_)(parameter);
}

template <typename T>
void CpuGpt<T>::ReadWeights() {
  // Each pass reads them anew: the optimizer writes weights between passes, and the model is not
  // told when.
  for (size_t i = 0; i < places_.size(); ++i) {
    const std::byte* weights = flat_spaces_[places_[i].group].weights.data() +
                               places_[i].offset * SizeBytes(weights_dtype_);
    for (int64_t e = 0; e < places_[i].elements; ++e) {
      working_weights_[i][e] = static_cast<T>(LoadElement(weights, weights_dtype_, e));
    }
  }
}

template <typename T>
void CpuGpt<T>::Reserve(const Batch& batch) {
  Check(batch.context >= 1 && batch.context <= config_.context, "a sequence fits the context");
  if (sequences_ == batch.sequences && context_ == batch.context) return;
  sequences_ = batch.sequences;
  context_ = batch.context;
  rows_ = sequences_ * context_;
  // Products of sizes are size_t here. The ints in the calls of layers are bounded beforehand, by
  // CheckIndices in run/worker_run.cc.
  const size_t rows = rows_;
  const size_t row_width = rows * config_.width;
  const size_t scores = rows * config_.heads * context_;
  for (BlockActivations& block : blocks_) {
    for (std::vector<T>* wide :
         {&block.in, &block.normal_1, &block.attended, &block.middle, &block.normal_2}) {
      wide->resize(row_width);
    }
    for (std::vector<T>* narrow : {&block.mean_1, &block.rstd_1, &block.mean_2, &block.rstd_2}) {
      narrow->resize(rows);
    }
    block.qkv.resize(3 * row_width);
    block.probabilities.resize(scores);
    for (std::vector<T>* hidden : {&block.hidden, &block.tanh_u, &block.activated}) {
      hidden->resize(4 * row_width);
    }
  }
  for (std::vector<T>* wide : {&final_in_, &final_normal_, &d_stream_, &d_width_}) {
    wide->resize(row_width);
  }
  final_mean_.resize(rows);
  final_rstd_.resize(rows);
  row_losses_.resize(rows);
  logits_.resize(rows * config_.vocabulary);
  d_qkv_.resize(3 * row_width);
  d_hidden_.resize(4 * row_width);
  d_scores_.resize(scores);
}

template <typename T>
double CpuGpt<T>::ForwardBackward(const Batch& batch, double loss_scale,
                                  const std::function<void(int parameter)>& gradient_ready) {
  Check(!places_.empty(), "a model is placed before it is used");
  // The pointer is valid during the call only, and Announce uses it no longer than that.
  gradient_ready_ = &gradient_ready;
  if (batch.sequences == 0) {
    BackwardNothing();
    return 0;
  }
  Reserve(batch);
  ReadWeights();
  const double loss_sum = Forward(batch);
  Backward(batch, static_cast<T>(loss_scale));
  return loss_sum;
}

template <typename T>
double CpuGpt<T>::Forward(const Batch& batch) {
  cpu::EmbeddingForward<T>({sequences_, context_, config_.width}, batch.inputs.data(),
                           Weight(kTokenEmbedding), Weight(kPositionEmbedding),
                           blocks_[0].in.data());
  for (int layer = 0; layer < config_.layers; ++layer) {
    // A block writes its output where the next one's input is kept for backward.
    ForwardBlock(layer, layer + 1 < config_.layers ? blocks_[layer + 1].in : final_in_);
  }
  const int norm = LastNormWeight(config_);
  cpu::LayerNormForward<T>({rows_, config_.width}, final_in_.data(), Weight(norm), Weight(norm + 1),
                           final_normal_.data(), final_mean_.data(), final_rstd_.data());
  // The head is the token embedding once more (Press and Wolf 2017), without a bias.
  cpu::MatmulForward<T>({rows_, config_.width, config_.vocabulary}, final_normal_.data(),
                        Weight(kTokenEmbedding), nullptr, logits_.data());
  return cpu::CrossEntropy<T>({rows_, config_.vocabulary}, batch.targets.data(), logits_.data(),
                              row_losses_.data());
}

// middle = in + attention(norm_1(in)),  out = middle + mlp(norm_2(middle))
template <typename T>
void CpuGpt<T>::ForwardBlock(int layer, std::vector<T>& out) {
  const int width = config_.width;
  BlockActivations& block = blocks_[layer];
  const auto weight = [&](InBlock which) { return Weight(BlockParameter(layer, which)); };
  // The layer before cannot add to the stream itself: MatmulForward writes its output.
  const auto add_residual = [](const std::vector<T>& residual, std::vector<T>& stream) {
    for (size_t i = 0; i < stream.size(); ++i) stream[i] += residual[i];
  };

  // This half is attention.
  cpu::LayerNormForward<T>({rows_, width}, block.in.data(), weight(kNorm1Weight),
                           weight(kNorm1Bias), block.normal_1.data(), block.mean_1.data(),
                           block.rstd_1.data());
  cpu::MatmulForward<T>({rows_, width, 3 * width}, block.normal_1.data(), weight(kQkvWeight),
                        weight(kQkvBias), block.qkv.data());
  cpu::AttentionForward<T>({sequences_, context_, width, config_.heads}, block.qkv.data(),
                           block.probabilities.data(), block.attended.data());
  cpu::MatmulForward<T>({rows_, width, width}, block.attended.data(), weight(kAttentionOutWeight),
                        weight(kAttentionOutBias), block.middle.data());
  add_residual(block.in, block.middle);

  // This half is the MLP.
  cpu::LayerNormForward<T>({rows_, width}, block.middle.data(), weight(kNorm2Weight),
                           weight(kNorm2Bias), block.normal_2.data(), block.mean_2.data(),
                           block.rstd_2.data());
  cpu::MatmulForward<T>({rows_, width, 4 * width}, block.normal_2.data(), weight(kHiddenWeight),
                        weight(kHiddenBias), block.hidden.data());
  cpu::GeluForward<T>(4 * rows_ * width, block.hidden.data(), block.activated.data(),
                      block.tanh_u.data());
  cpu::MatmulForward<T>({rows_, 4 * width, width}, block.activated.data(), weight(kMlpOutWeight),
                        weight(kMlpOutBias), out.data());
  add_residual(block.middle, out);
}

template <typename T>
void CpuGpt<T>::Backward(const Batch& batch, T loss_scale) {
  // The forward pass leaves the loss's gradient in the logits.
  // Backward is linear in it, so the scale multiplies every gradient.
  if (loss_scale != 1) {
    for (T& gradient : logits_) gradient *= loss_scale;
  }
  // The head's part of the token embedding's gradient. It is not announced yet: the embedding adds
  // its own part at the end of the pass.
  cpu::MatmulBackward<T>({rows_, config_.width, config_.vocabulary}, logits_.data(),
                         final_normal_.data(), Weight(kTokenEmbedding), d_width_.data(),
                         Gradient(kTokenEmbedding), nullptr);
  const int norm = LastNormWeight(config_);
  // A norm adds its gradient to that of the residual stream, which begins with zeros here.
  std::fill(d_stream_.begin(), d_stream_.end(), T{0});
  cpu::LayerNormBackward<T>({rows_, config_.width}, d_width_.data(), final_in_.data(), Weight(norm),
                            final_mean_.data(), final_rstd_.data(), d_stream_.data(),
                            Gradient(norm), Gradient(norm + 1));
  Announce(norm);
  Announce(norm + 1);
  for (int layer = config_.layers - 1; layer >= 0; --layer) BackwardBlock(layer);
  // Positions past the batch's context have no gradient.
  std::fill(Gradient(kPositionEmbedding),
            Gradient(kPositionEmbedding) + places_[kPositionEmbedding].elements, T{0});
  cpu::EmbeddingBackward<T>({sequences_, context_, config_.width}, batch.inputs.data(),
                            d_stream_.data(), Gradient(kTokenEmbedding),
                            Gradient(kPositionEmbedding));
  Announce(kPositionEmbedding);
  Announce(kTokenEmbedding);
}

template <typename T>
void CpuGpt<T>::BackwardBlock(int layer) {
  const int width = config_.width;
  const BlockActivations& block = blocks_[layer];
  const auto weight = [&](InBlock which) { return Weight(BlockParameter(layer, which)); };
  const auto gradient = [&](InBlock which) { return Gradient(BlockParameter(layer, which)); };
  // Announces a layer's weight and the bias that stands after it.
  const auto announce = [&](InBlock which) {
    Announce(BlockParameter(layer, which));
    Announce(BlockParameter(layer, which) + 1);
  };

  // This is the MLP. Where a branch was added to the residual stream, the gradient of the sum is
  // that of both: d_stream is at once the gradient of what the MLP gave. The norm at the beginning
  // of the branch adds to it what came back through the branch.
  cpu::MatmulBackward<T>({rows_, 4 * width, width}, d_stream_.data(), block.activated.data(),
                         weight(kMlpOutWeight), d_hidden_.data(), gradient(kMlpOutWeight),
                         gradient(kMlpOutBias));
  // The announcement comes at once, so that the bucket is reduced while the next layers are
  // computed.
  announce(kMlpOutWeight);
  cpu::GeluBackward<T>(4 * rows_ * width, d_hidden_.data(), block.hidden.data(),
                       block.tanh_u.data(), d_hidden_.data());
  cpu::MatmulBackward<T>({rows_, width, 4 * width}, d_hidden_.data(), block.normal_2.data(),
                         weight(kHiddenWeight), d_width_.data(), gradient(kHiddenWeight),
                         gradient(kHiddenBias));
  announce(kHiddenWeight);
  cpu::LayerNormBackward<T>({rows_, width}, d_width_.data(), block.middle.data(),
                            weight(kNorm2Weight), block.mean_2.data(), block.rstd_2.data(),
                            d_stream_.data(), gradient(kNorm2Weight), gradient(kNorm2Bias));
  announce(kNorm2Weight);

  // Attention follows in the same way. d_stream is the gradient of `middle` now.
  cpu::MatmulBackward<T>({rows_, width, width}, d_stream_.data(), block.attended.data(),
                         weight(kAttentionOutWeight), d_width_.data(),
                         gradient(kAttentionOutWeight), gradient(kAttentionOutBias));
  announce(kAttentionOutWeight);
  cpu::AttentionBackward<T>({sequences_, context_, width, config_.heads}, d_width_.data(),
                            block.qkv.data(), block.probabilities.data(), d_qkv_.data(),
                            d_scores_.data());
  cpu::MatmulBackward<T>({rows_, width, 3 * width}, d_qkv_.data(), block.normal_1.data(),
                         weight(kQkvWeight), d_width_.data(), gradient(kQkvWeight),
                         gradient(kQkvBias));
  announce(kQkvWeight);
  cpu::LayerNormBackward<T>({rows_, width}, d_width_.data(), block.in.data(), weight(kNorm1Weight),
                            block.mean_1.data(), block.rstd_1.data(), d_stream_.data(),
                            gradient(kNorm1Weight), gradient(kNorm1Bias));
  announce(kNorm1Weight);
}

// A rank without a sample still takes part in every reduction, with zeros.
template <typename T>
void CpuGpt<T>::BackwardNothing() {
  for (const int parameter : backward_order_) {
    std::fill(Gradient(parameter), Gradient(parameter) + places_[parameter].elements, T{0});
    Announce(parameter);
  }
}

template class CpuGpt<float>;
template class CpuGpt<double>;

std::unique_ptr<Model> MakeCpuGpt(const GptConfig& config) {
  return std::make_unique<CpuGpt<float>>(config);
}

}  // namespace ballast::worker
