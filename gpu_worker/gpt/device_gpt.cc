#include "gpu_worker/gpt/device_gpt.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/attention.h"
#include "gpu_worker/cuda/kernels/cross_entropy.h"
#include "gpu_worker/cuda/kernels/embedding.h"
#include "gpu_worker/gpt/activations.h"
#include "gpu_worker/gpt/device_layers.h"
#include "gpu_worker/gpt/token_upload.h"

namespace ballast::worker {
namespace {

// Tensor cores and vector loads want tensors at multiples of so many bytes.
constexpr uintptr_t kAlignmentBytes = 16;

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kAlignmentBytes == 0;
}

// What Backward goes on from.
struct Begun {
  cuda::EmbeddingShape shape;  // No sequences: an empty batch.
  TokensOnDevice tokens;
};

// One call of Forward or Backward.
struct Pass {
  LayerPass layers;
  cuda::EmbeddingShape embedding;
  cuda::AttentionShape attention;
  TokensOnDevice tokens;
  BackwardOptions options = {};

  DeviceStream& compute() const { return layers.compute; }
};

class DeviceGptImpl final : public DeviceGpt {
 public:
  DeviceGptImpl(const GptConfig& config, const DeviceGptParts& parts, int sequences,
                Activations activations, std::unique_ptr<TokenUpload> upload)
      : config_(config),
        parts_(parts),
        sequences_(sequences),
        scratch_bytes_(ScratchBytes(config, sequences, config.context)),
        backward_order_(GptBackwardOrder(config)),
        activations_(std::move(activations)),
        upload_(std::move(upload)) {}
  // The device reads and writes what is about to go.
  ~DeviceGptImpl() override { parts_.compute.Synchronize().IgnoreError(); }

  void Place(const Layout& layout, const DeviceFlatSpaces& spaces) override;
  absl::Status Prepare(const Batch& batch) override;
  absl::Status Forward(const Batch& batch, const DevicePassEvents& events) override;
  absl::Status Backward(const BackwardOptions& options, double* loss_sum,
                        const DevicePassEvents& events) override;
  int64_t activation_bytes() const override { return activations_.bytes + upload_->device_bytes(); }
  double FloatingPointOperations(int sequences) const override;

 private:
  absl::Status CheckBatch(const Batch& batch) const;
  Pass PassOf(const Begun& begun, const DevicePassEvents& events) const;
  absl::Status ForwardBlock(const Pass& pass, int layer) const;
  absl::Status ForwardHead(const Pass& pass, double* loss_sum) const;
  absl::Status BackwardHead(const Pass& pass) const;
  absl::Status BackwardBlock(const Pass& pass, int layer) const;
  absl::Status BackwardEmbedding(const Pass& pass) const;
  absl::Status BackwardNothing(bool add_gradients, const DevicePassEvents& events) const;

  Linear Qkv(int layer) const {
    return {BlockParameter(layer, kQkvWeight), config_.width, 3 * config_.width};
  }
  Linear AttentionOut(int layer) const {
    return {BlockParameter(layer, kAttentionOutWeight), config_.width, config_.width};
  }
  Linear Hidden(int layer) const {
    return {BlockParameter(layer, kHiddenWeight), config_.width, 4 * config_.width};
  }
  Linear MlpOut(int layer) const {
    return {BlockParameter(layer, kMlpOutWeight), 4 * config_.width, config_.width};
  }

  const GptConfig config_;
  const DeviceGptParts parts_;
  const int sequences_;
  const size_t scratch_bytes_;
  const std::vector<int> backward_order_;
  std::vector<ParameterOnDevice> parameters_;
  const Activations activations_;
  const std::unique_ptr<TokenUpload> upload_;
  std::optional<Begun> begun_;  // By Forward; Backward ends it.
};

void DeviceGptImpl::Place(const Layout& layout, const DeviceFlatSpaces& spaces) {
  const std::vector<ModelParameter> parameters = GptParameters(config_);
  Check(parameters_.empty(), "a model is placed once");
  Check(layout.spec().parameters.size() == parameters.size(), "the layout is of this model");
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterPlace& place = layout.place(static_cast<int>(i));
    const int group = layout.spec().parameters[i].group;
    Check(place.offset >= 0, "every parameter is trainable");
    Check(place.elements == parameters[i].elements(), "the layout is of this model");
    parameters_.push_back({.name = parameters[i].name,
                           .weight = spaces.weights[group] + place.offset,
                           .gradient = spaces.gradients[group] + place.offset,
                           .elements = place.elements});
    Check(IsAligned(parameters_.back().weight) && IsAligned(parameters_.back().gradient),
          "parameters are at multiples of 16 bytes");
  }
}

absl::Status DeviceGptImpl::CheckBatch(const Batch& batch) const {
  if (batch.sequences > sequences_ || batch.context < 1 || batch.context > config_.context) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a pass over ", batch.sequences, " sequences of ", batch.context,
        " tokens does not fit; there is memory for ", sequences_, " of at most ", config_.context));
  }
  const size_t rows = static_cast<size_t>(batch.sequences) * batch.context;
  Check(batch.inputs.size() == rows && batch.targets.size() == rows, "a batch has its tokens");
  for (const std::vector<int32_t>* tokens : {&batch.inputs, &batch.targets}) {
    // The host checks them, because the kernels look tokens up without a check: a wrong one would
    // read, or add a gradient to, memory beyond the embedding.
    const auto [least, most] = std::minmax_element(tokens->begin(), tokens->end());
    if (*least < 0 || *most >= config_.vocabulary) {
      return absl::InvalidArgumentError(
          absl::StrCat("a batch has token ", *least < 0 ? *least : *most, ", but the model knows ",
                       config_.vocabulary, " tokens; choose a model for this text's tokens"));
    }
  }
  return absl::OkStatus();
}

Pass DeviceGptImpl::PassOf(const Begun& begun, const DevicePassEvents& events) const {
  const cuda::EmbeddingShape& shape = begun.shape;
  return {.layers = {.compute = parts_.compute,
                     .matmul = parts_.matmul,
                     .parameters = parameters_,
                     .events = events,
                     .rows = shape.rows(),
                     .scratch = activations_.scratch},
          .embedding = shape,
          .attention = {shape.sequences, shape.context, config_.width, config_.heads},
          .tokens = begun.tokens};
}

// ---------------------------------------------------------------- forward

absl::Status DeviceGptImpl::Prepare(const Batch& batch) {
  // A world of more ranks than sequences has ranks without any.
  if (batch.sequences == 0) return absl::OkStatus();
  // A batch that is prepared was checked then.
  if (!upload_->IsPrepared(batch)) BALLAST_RETURN_IF_ERROR(CheckBatch(batch));
  return upload_->Prepare(batch);
}

absl::Status DeviceGptImpl::Forward(const Batch& batch, const DevicePassEvents& events) {
  Check(!parameters_.empty(), "a model is placed before it is used");
  // It is set again only at the end: after a Forward that failed there is nothing for Backward to
  // go on from.
  begun_.reset();
  if (batch.sequences == 0) {
    begun_ = Begun{};
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(Prepare(batch));
  Check(ScratchBytes(config_, batch.sequences, batch.context) <= scratch_bytes_,
        "a smaller pass needs no more scratch");
  // The copy is on the stream of the passes, so the tokens of the pass before stay until that is
  // done.
  BALLAST_ASSIGN_OR_RETURN(const TokensOnDevice tokens, upload_->Upload(parts_.compute, batch));
  const Begun begun{.shape = {batch.sequences, batch.context, config_.width}, .tokens = tokens};
  const Pass pass = PassOf(begun, events);
  const Activations& a = activations_;
  const LayerPass& layers = pass.layers;
  // An event comes just before the work that needs it: the stream may begin with the first layers
  // while the weights of later ones are still on their way.
  BALLAST_RETURN_IF_ERROR(Call(events.before_weights, kTokenEmbedding));
  BALLAST_RETURN_IF_ERROR(Call(events.before_weights, kPositionEmbedding));
  BALLAST_RETURN_IF_ERROR(cuda::EmbeddingForward(
      pass.compute(), pass.embedding, pass.tokens.inputs, layers.weight(kTokenEmbedding),
      layers.weight(kPositionEmbedding), a.blocks[0].norm_1.in));
  for (int layer = 0; layer < config_.layers; ++layer) {
    BALLAST_RETURN_IF_ERROR(ForwardBlock(pass, layer));
  }
  BALLAST_RETURN_IF_ERROR(NormForward(layers, LastNormWeight(config_), config_.width,
                                      {a.blocks.back().norm_2.in, a.branch}, a.last_norm));
  // The head is left to Backward: its result depends on the loss scale, which is not known yet
  // where a forward pass begins before the step before it is over.
  begun_ = begun;
  return absl::OkStatus();
}

// middle = in + attention(norm_1(in)),  out = middle + mlp(norm_2(middle))
//
// The norm after a branch adds it to the residual stream; until then it waits in `branch`.
absl::Status DeviceGptImpl::ForwardBlock(const Pass& pass, int layer) const {
  const LayerPass& layers = pass.layers;
  const BlockActivations& block = activations_.blocks[layer];
  BFloat16Bits* const branch = activations_.branch;
  const BeforeNorm before = layer == 0
                                ? BeforeNorm{}  // The embedding is in its place already.
                                : BeforeNorm{activations_.blocks[layer - 1].norm_2.in, branch};

  BALLAST_RETURN_IF_ERROR(NormForward(layers, BlockParameter(layer, kNorm1Weight), config_.width,
                                      before, block.norm_1));
  BALLAST_RETURN_IF_ERROR(LinearForward(layers, Qkv(layer), block.norm_1.out, block.qkv));
  BALLAST_RETURN_IF_ERROR(cuda::AttentionForward(pass.compute(), pass.attention, block.qkv,
                                                 block.attended, block.logsumexp));
  BALLAST_RETURN_IF_ERROR(LinearForward(layers, AttentionOut(layer), block.attended, branch));

  BALLAST_RETURN_IF_ERROR(NormForward(layers, BlockParameter(layer, kNorm2Weight), config_.width,
                                      {block.norm_1.in, branch}, block.norm_2));
  BALLAST_RETURN_IF_ERROR(
      LinearForward(layers, Hidden(layer), block.norm_2.out, block.activated, block.hidden));
  return LinearForward(layers, MlpOut(layer), block.activated, branch);
}

// The logits, and in their place their gradient.
absl::Status DeviceGptImpl::ForwardHead(const Pass& pass, double* loss_sum) const {
  const Activations& a = activations_;
  const LayerPass& layers = pass.layers;
  // There is no event: the weight was announced for the embedding, at the beginning of the pass.
  BALLAST_RETURN_IF_ERROR(layers.Run({.m = layers.rows,
                                      .n = config_.vocabulary,
                                      .k = config_.width,
                                      .transpose_b = true,
                                      .a = a.last_norm.out,
                                      .b = layers.weight(kTokenEmbedding),
                                      .out = a.logits},
                                     kTokenEmbedding));
  BALLAST_RETURN_IF_ERROR(
      cuda::CrossEntropy(pass.compute(), layers.rows, config_.vocabulary, pass.tokens.targets,
                         static_cast<float>(pass.options.loss_scale), a.logits, a.losses));
  return cuda::SumLosses(pass.compute(), layers.rows, a.losses, pass.options.add_loss, loss_sum);
}

// ---------------------------------------------------------------- backward

absl::Status DeviceGptImpl::Backward(const BackwardOptions& options, double* loss_sum,
                                     const DevicePassEvents& events) {
  Check(begun_.has_value(), "a backward pass follows its forward pass");
  const Begun begun = *std::exchange(begun_, std::nullopt);
  if (begun.shape.sequences == 0) {
    // This rank adds nothing. But where nothing was there before, the sum has to begin with zero.
    if (!options.add_loss) {
      BALLAST_RETURN_IF_ERROR(parts_.compute.Zero(loss_sum, sizeof(*loss_sum)));
    }
    return BackwardNothing(options.add_gradients, events);
  }
  Pass pass = PassOf(begun, events);
  pass.options = options;
  pass.layers.add_gradients = options.add_gradients;
  BALLAST_RETURN_IF_ERROR(ForwardHead(pass, loss_sum));
  BALLAST_RETURN_IF_ERROR(BackwardHead(pass));
  for (int layer = config_.layers - 1; layer >= 0; --layer) {
    BALLAST_RETURN_IF_ERROR(BackwardBlock(pass, layer));
  }
  return BackwardEmbedding(pass);
}

// The head is the token embedding too, whose gradient begins here and ends with the embedding's.
absl::Status DeviceGptImpl::BackwardHead(const Pass& pass) const {
  const Activations& a = activations_;
  const LayerPass& layers = pass.layers;
  BALLAST_RETURN_IF_ERROR(Call(layers.events.before_gradient, kTokenEmbedding));
  // This is the head's part of the token embedding's gradient. gradient_ready follows in
  // BackwardEmbedding.
  BALLAST_RETURN_IF_ERROR(layers.Run({.m = config_.vocabulary,
                                      .n = config_.width,
                                      .k = layers.rows,
                                      .transpose_a = true,
                                      .a = a.logits,
                                      .b = a.last_norm.out,
                                      .out = layers.gradient(kTokenEmbedding),
                                      .out_is_fp32 = true,
                                      .beta = layers.add_gradients ? 1.0f : 0.0f},
                                     kTokenEmbedding));
  BALLAST_RETURN_IF_ERROR(layers.Run({.m = layers.rows,
                                      .n = config_.width,
                                      .k = config_.vocabulary,
                                      .a = a.logits,
                                      .b = layers.weight(kTokenEmbedding),
                                      .out = a.branch},
                                     kTokenEmbedding));
  // d_stream is assigned and not added to: nothing is in it yet that belongs to this pass.
  return NormBackward(layers, LastNormWeight(config_), config_.width, a.branch, a.last_norm,
                      a.d_stream, /*assign=*/true);
}

absl::Status DeviceGptImpl::BackwardBlock(const Pass& pass, int layer) const {
  const LayerPass& layers = pass.layers;
  const BlockActivations& block = activations_.blocks[layer];
  BFloat16Bits* const branch = activations_.branch;
  BFloat16Bits* const d_stream = activations_.d_stream;
  BFloat16Bits* const d_wide = activations_.d_wide;

  // Each layer first gives the gradient of its parameters, which then travels while the rest goes
  // on. d_stream is the gradient of the residual stream, and so of what the branch added to it; the
  // branch's norm adds to it what came through the branch.
  BALLAST_RETURN_IF_ERROR(LinearGradients(layers, MlpOut(layer), d_stream, block.activated));
  BALLAST_RETURN_IF_ERROR(
      LinearInputGradient(layers, MlpOut(layer), d_stream, d_wide, block.hidden));
  BALLAST_RETURN_IF_ERROR(LinearGradients(layers, Hidden(layer), d_wide, block.norm_2.out));
  BALLAST_RETURN_IF_ERROR(LinearInputGradient(layers, Hidden(layer), d_wide, branch));
  BALLAST_RETURN_IF_ERROR(NormBackward(layers, BlockParameter(layer, kNorm2Weight), config_.width,
                                       branch, block.norm_2, d_stream, /*assign=*/false));

  // The same follows through attention. d_wide and branch are used again: the stream is past the
  // work that read them.
  BALLAST_RETURN_IF_ERROR(LinearGradients(layers, AttentionOut(layer), d_stream, block.attended));
  BALLAST_RETURN_IF_ERROR(LinearInputGradient(layers, AttentionOut(layer), d_stream, branch));
  BALLAST_RETURN_IF_ERROR(cuda::AttentionBackward(pass.compute(), pass.attention, block.qkv,
                                                  block.attended, block.logsumexp, branch, d_wide,
                                                  activations_.scratch));
  BALLAST_RETURN_IF_ERROR(LinearGradients(layers, Qkv(layer), d_wide, block.norm_1.out));
  BALLAST_RETURN_IF_ERROR(LinearInputGradient(layers, Qkv(layer), d_wide, branch));
  return NormBackward(layers, BlockParameter(layer, kNorm1Weight), config_.width, branch,
                      block.norm_1, d_stream, /*assign=*/false);
}

absl::Status DeviceGptImpl::BackwardEmbedding(const Pass& pass) const {
  const LayerPass& layers = pass.layers;
  float* const positions = layers.gradient(kPositionEmbedding);
  // The token embedding's was called by BackwardHead, before the first work that writes there.
  BALLAST_RETURN_IF_ERROR(Call(layers.events.before_gradient, kPositionEmbedding));
  BALLAST_RETURN_IF_ERROR(cuda::EmbeddingBackward(
      pass.compute(), pass.embedding, pass.tokens.rows_of_inputs, activations_.d_stream,
      layers.gradient(kTokenEmbedding), positions, layers.add_gradients));
  // Positions past the batch's context have no gradient.
  // The kernel writes the first `context` rows only.
  const int64_t written = int64_t{pass.embedding.context} * config_.width;
  const int64_t rest = parameters_[kPositionEmbedding].elements - written;
  if (rest > 0 && !layers.add_gradients) {
    BALLAST_RETURN_IF_ERROR(pass.compute().Zero(positions + written, rest * sizeof(float)));
  }
  BALLAST_RETURN_IF_ERROR(Call(layers.events.gradient_ready, kPositionEmbedding));
  return Call(layers.events.gradient_ready, kTokenEmbedding);
}

// A rank without a sample still takes part in every reduction, with zeros.
absl::Status DeviceGptImpl::BackwardNothing(bool add_gradients,
                                            const DevicePassEvents& events) const {
  // This is the order of a pass that has tokens, in which the ranks reduce the buckets.
  for (const int parameter : backward_order_) {
    const ParameterOnDevice& place = parameters_[parameter];
    BALLAST_RETURN_IF_ERROR(Call(events.before_gradient, parameter));
    if (!add_gradients) {
      BALLAST_RETURN_IF_ERROR(parts_.compute.Zero(place.gradient, place.elements * sizeof(float)));
    }
    BALLAST_RETURN_IF_ERROR(Call(events.gradient_ready, parameter));
  }
  return absl::OkStatus();
}

// Linear layers and the head: 2 a weight and token. Attention, q . k and p v: each 2 a feature and
// pair of positions of which one may see the other. Backward has two products for each of forward.
double DeviceGptImpl::FloatingPointOperations(int sequences) const {
  const double width = config_.width, context = config_.context, layers = config_.layers;
  const double tokens = sequences * context;
  const double linear = 2 * tokens * width * (12 * width * layers + config_.vocabulary);
  const double pairs = sequences * context * (context + 1) / 2;
  const double attention = layers * 2 * 2 * width * pairs;
  return 3 * (linear + attention);
}

}  // namespace

absl::Status DeviceGpt::ForwardBackward(const Batch& batch, const BackwardOptions& options,
                                        double* loss_sum, const DevicePassEvents& events) {
  BALLAST_RETURN_IF_ERROR(Forward(batch, events));
  return Backward(options, loss_sum, events);
}

absl::StatusOr<std::unique_ptr<DeviceGpt>> DeviceGpt::Create(const GptConfig& config,
                                                             const DeviceGptParts& parts,
                                                             int sequences) {
  BALLAST_RETURN_IF_ERROR(Validate(config));
  Check(sequences >= 1, "a pass has a sequence");
  BALLAST_RETURN_IF_ERROR(cuda::ValidateAttention({.sequences = sequences,
                                                   .context = config.context,
                                                   .width = config.width,
                                                   .heads = config.heads}));
  // Rows of tokens are int32 on the device (cuda::TokenRows).
  const int64_t rows = int64_t{sequences} * config.context;
  if (rows > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat(sequences, " sequences of ", config.context,
                     " tokens are more tokens than 32 bits count; choose a smaller --batch or "
                     "--context"));
  }
  // Memory is taken now and not with the first pass: what is too large is refused before training.
  BALLAST_ASSIGN_OR_RETURN(Activations activations,
                           AllocateActivations(parts.device, config, sequences));
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<TokenUpload> upload,
                           TokenUpload::Create(parts.device, rows));
  return std::make_unique<DeviceGptImpl>(config, parts, sequences, std::move(activations),
                                         std::move(upload));
}

}  // namespace ballast::worker
