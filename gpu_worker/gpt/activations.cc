#include "gpu_worker/gpt/activations.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/attention.h"
#include "gpu_worker/cuda/kernels/layer_norm.h"

namespace ballast::worker {
namespace {

// Tensors are known before any is allocated, so that an error can report the size of all of them.
// Each has memory of its own: a tool that checks memory then catches a kernel that leaves its
// tensor.
class Plan {
 public:
  explicit Plan(int64_t rows) : rows_(rows) {}

  template <typename T>
  void Tensor(T*& tensor, int64_t columns) {
    Bytes(tensor, rows_ * columns * static_cast<int64_t>(sizeof(T)));
  }
  template <typename T>
  void Bytes(T*& tensor, int64_t bytes) {
    bytes_ += bytes;
    // The pointer is written only when its memory is there. Until then the plan refers to it, so
    // what it is part of must stay where it is.
    wanted_.push_back({bytes, [&tensor](const DeviceMemory& memory) { tensor = memory.as<T>(); }});
  }
  int64_t bytes() const { return bytes_; }

  absl::StatusOr<std::vector<std::unique_ptr<DeviceMemory>>> Allocate(Device& device) const {
    std::vector<std::unique_ptr<DeviceMemory>> all;
    for (const Wanted& wanted : wanted_) {
      BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> memory,
                               device.Allocate(wanted.bytes, "activations"));
      wanted.set(*memory);
      all.push_back(std::move(memory));
    }
    return all;
  }

 private:
  struct Wanted {
    int64_t bytes = 0;
    std::function<void(const DeviceMemory&)> set;
  };
  const int64_t rows_;
  int64_t bytes_ = 0;
  std::vector<Wanted> wanted_;
};

void PlanNorm(NormActivations& norm, int64_t width, Plan& plan) {
  plan.Tensor(norm.in, width);
  plan.Tensor(norm.out, width);
  plan.Tensor(norm.mean, 1);
  plan.Tensor(norm.rstd, 1);
}

}  // namespace

absl::StatusOr<Activations> AllocateActivations(Device& device, const GptConfig& config,
                                                int sequences) {
  const int64_t width = config.width;
  Activations activations;
  Plan plan(int64_t{sequences} * config.context);
  // The blocks are made before the first tensor is planned: the plan refers to pointers in them.
  activations.blocks.resize(config.layers);
  for (BlockActivations& block : activations.blocks) {
    PlanNorm(block.norm_1, width, plan);
    plan.Tensor(block.qkv, 3 * width);
    plan.Tensor(block.attended, width);
    plan.Tensor(block.logsumexp, config.heads);
    PlanNorm(block.norm_2, width, plan);
    plan.Tensor(block.hidden, 4 * width);
    plan.Tensor(block.activated, 4 * width);
  }
  PlanNorm(activations.last_norm, width, plan);
  plan.Tensor(activations.logits, config.vocabulary);
  plan.Tensor(activations.losses, 1);
  plan.Tensor(activations.branch, width);
  plan.Tensor(activations.d_stream, width);
  plan.Tensor(activations.d_wide, 4 * width);
  // All kernels share one scratch: those that use it are on one stream, and so never run at once.
  plan.Bytes(activations.scratch,
             static_cast<int64_t>(ScratchBytes(config, sequences, config.context)));

  auto memory = plan.Allocate(device);
  // Allocate has given back what it had. The error names the size of all tensors, since the one
  // that did not fit says little.
  if (absl::IsResourceExhausted(memory.status())) {
    return Annotate(
        memory.status(),
        absl::StrCat("activations of ", sequences, " sequences of ", config.context,
                     " tokens take ",
                     absl::StrFormat("%.2f", static_cast<double>(plan.bytes()) / (1 << 30)),
                     " GiB; choose a smaller --batch with more --micro-steps, or a "
                     "smaller model or --context"));
  }
  BALLAST_RETURN_IF_ERROR(memory.status());
  activations.memory = *std::move(memory);
  activations.bytes = plan.bytes();
  return activations;
}

size_t ScratchBytes(const GptConfig& config, int sequences, int context) {
  const int64_t rows = int64_t{sequences} * context;
  // The result is the most that any kernel of a pass asks for.
  size_t bytes = cuda::AttentionScratchBytes(
      {.sequences = sequences, .context = context, .width = config.width, .heads = config.heads});
  bytes = std::max(bytes, cuda::LayerNormScratchBytes({.rows = rows, .width = config.width}));
  // These are the widths of the biases: of both output layers, of qkv, of hidden.
  for (const int columns : {config.width, 3 * config.width, 4 * config.width}) {
    bytes = std::max(bytes, cuda::ColumnSumScratchBytes(rows, columns));
  }
  return bytes;
}

}  // namespace ballast::worker
