// Where a rank's passes run and where its weights and gradients are: the CPU (cpu/cpu_backend.h) or
// a GPU (pipeline/device_backend.h). The trainer's loop is the same on both.
//
//   backend.Start(optimizer);
//   for each step:
//     for each micro-step: backend.MicroStep(...)    // gradients leave while backward goes on
//     FinishedStep finished = backend.FinishStep().value();   // every sink call has been made
//     ... the optimizer decides, and writes weights to weights(chunk) ...
//     backend.GatherWeights();                       // and the next passes compute with them
//
// A backend that gathers ahead takes a step's weights where the optimizer leaves them, as they
// arrive, and the next step's first forward pass begins meanwhile:
//
//     backend.ExpectWeights();                       // decided, on all ranks
//     backend.StartForward(...);                     // of the next step's micro-step 0
//     backend.GatherWeights();                       // all have arrived
//
// Threads: one caller, except for weights, OnWeights, OnProvisionalWeights, OnDroppedWeights and
// AbandonWeights, which any thread may call; weights and OnWeights only while no passes are in
// progress: between FinishStep, or Start, and GatherWeights. The sink is called from one thread at
// a time, the caller's or the backend's own.
#ifndef BALLAST_GPU_WORKER_TRAINING_BACKEND_H_
#define BALLAST_GPU_WORKER_TRAINING_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/data.h"
#include "gpu_worker/training/second_round.h"

namespace ballast::worker {

// The destination of this rank's reduced gradients: the optimizer. An error ends the step. Then the
// backend continues to take part in the step's collectives, so that no other rank waits for it,
// stops calling the sink, and returns the error from FinishStep.
class GradientSink {
 public:
  virtual ~GradientSink() = default;

  // A chunk of this rank, in the wire dtype; `released` is called exactly once, whatever the
  // result.
  virtual absl::Status Push(client::GradientPush push) = 0;
  // Several at once, as one Push after another. After an error the rest is only released.
  virtual absl::Status PushAll(std::vector<client::GradientPush> pushes) {
    absl::Status status;
    for (client::GradientPush& push : pushes) {
      if (!status.ok()) {
        if (push.released) push.released();
        continue;
      }
      const int chunk = push.chunk;
      const uint32_t micro_step = push.micro_step_end - 1;
      status = Annotate(Push(std::move(push)),
                        absl::StrCat("chunk ", chunk, " of micro-step ", micro_step));
    }
    return status;
  }
  // After the pushes of that micro-step, and before those of the next.
  virtual absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) = 0;
};

struct MicroStepInput {
  uint64_t step = 0;
  uint32_t micro_step = 0;
  uint32_t micro_steps = 1;
  // This rank's slice; if it is empty, gradients are zeros.
  const Batch& batch;
  // Gradients are of the loss summed over the batch's tokens, times this.
  double loss_scale = 1;
};

struct FinishedStep {
  double loss_sum = 0;  // In nats, over this rank's tokens of all micro-steps.
  // The step's seconds: in passes; waiting for reductions, in passes and after them; the same for
  // handing gradients over; and waiting, in passes, for weights of the step before. On a GPU the
  // waits in passes are its own, by its clock, rather than those of the giving thread. The time
  // between a forward pass of StartForward and the MicroStep that continues it counts as waiting
  // for weights.
  double compute_seconds = 0;
  double reduce_seconds = 0;
  double send_seconds = 0;
  double weights_seconds = 0;
  // By the GPU's clock: its idle time from the end of the previous step to this step's first
  // kernel, and between passes; without the time that the previous FinishStep reported.
  double idle_seconds = 0;
};

class TrainingBackend {
 public:
  virtual ~TrainingBackend() = default;

  // Once, before all other calls. `sink` is borrowed, and not called after the last FinishStep.
  virtual void Start(GradientSink& sink) = 0;

  // From now on chunks are handed over in `memory(chunk)`, which stays valid until the next call.
  // If that is empty, the backend's own memory is used. A device's backend pins it: call this
  // before the memory ends, with null if there is no other yet. No passes are in progress. Except
  // for a call with null, all payloads are released.
  virtual absl::Status UseGradientMemory(
      const std::function<absl::Span<std::byte>(int chunk)>& memory) = 0;
  // The same for weights, in a backend that gathers ahead: where the optimizer leaves those of a
  // chunk of this rank. Drops earlier notices of weights.
  virtual absl::Status UseWeightsMemory(
      const std::function<absl::Span<std::byte>(int chunk)>& memory) {
    return absl::OkStatus();
  }

  // The host's work for the first pass of the next step, during this step's passes. That pass may
  // use another batch.
  virtual absl::Status PrepareBatch(const Batch& batch) { return absl::OkStatus(); }
  virtual absl::Status MicroStep(const MicroStepInput& input) = 0;
  // After all micro-steps of a step; also after an error, which it returns.
  virtual absl::StatusOr<FinishedStep> FinishStep() = 0;

  // Where the optimizer writes the weights of a chunk of this rank, in the group's return dtype.
  // Not for a backend that gathers ahead.
  virtual absl::Span<std::byte> weights(int chunk) = 0;
  // They are complete. An optimizer without such events may omit this: GatherWeights takes all. A
  // chunk's weights may arrive again before that, for example when a step is lost: the last count.
  virtual void OnWeights(int chunk) {}
  // All ranks' weights are in place before the next passes use them. A collective.
  virtual absl::Status GatherWeights() = 0;

  // Whether it takes weights where the optimizer leaves them. The calls below are for that case.
  virtual bool gathers_ahead() const { return false; }
  // Provisional weights of a chunk arrived (client::SessionOptions); they are void.
  virtual void OnProvisionalWeights(int chunk) {}
  virtual void OnDroppedWeights(int chunk) {}
  // A collective: OnWeights is called for each chunk of this rank, before or after this.
  virtual absl::Status ExpectWeights() { return absl::OkStatus(); }
  // The forward pass that the next MicroStep, of the same step and batch, continues. Waits until
  // the weights that it reads have arrived, or are abandoned; an error is the device's.
  virtual absl::Status StartForward(const MicroStepInput& input) { return absl::OkStatus(); }
  // Some of the expected weights will not arrive. The gathers go on with the contents of the
  // memory, so that no rank waits for this one. The result of the next GatherWeights and of the
  // forward pass is void; the GatherWeights after that brings other weights.
  virtual void AbandonWeights() {}

  // Null, unless this job's workers make Newton-Schulz.
  virtual SecondRound* second_round() { return nullptr; }

  // A group's flat space of weights as the passes use them, in the format of the model.
  virtual absl::Status ReadWeights(int group, absl::Span<std::byte> to) = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_BACKEND_H_
