// The training loop of one rank, as DESIGN.md section 3 tells it: trainer.cc reads top to bottom.
//
//   Trainer trainer(options, {.model = ..., .data = ..., ...});
//   trainer.Run([](const StepReport& report) { ... });
//
// Threads: one caller. Everything in TrainerParts is borrowed until destruction.
#ifndef BALLAST_GPU_WORKER_TRAINER_H_
#define BALLAST_GPU_WORKER_TRAINER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu_worker/bucket_reducer.h"
#include "gpu_worker/collective.h"
#include "gpu_worker/data.h"
#include "gpu_worker/gradient_staging.h"
#include "gpu_worker/learning_rate.h"
#include "gpu_worker/model.h"
#include "gpu_worker/optimizer.h"
#include "gpu_worker/training_job.h"

namespace ballast::worker {

struct TrainerOptions {
  uint64_t steps = 80;  // The last one.
  uint32_t micro_steps = 2;
  int batch = 12;     // Sequences in a micro-step, of all ranks together.
  int context = 128;  // Tokens in a sequence.
  uint64_t seed = 1;
  LearningRateSchedule learning_rate;
};

// What a step took on this rank, in seconds of the training thread. Reducing and sending happen
// while backward goes on; their entries are only what was left to wait for.
struct StepTimes {
  double compute = 0;  // Forward and backward.
  double reduce = 0;   // Waiting for the last buckets' reduce-scatter.
  double send = 0;     // Waiting for the last shards to be handed over, and for the decision.
  double update = 0;   // The optimizer's arithmetic, from the decision on.
  double receive = 0;  // Waiting for new weights beyond that, and the all-gather.
};

struct StepReport {
  uint64_t step = 0;
  double loss = 0;  // Mean over the step's tokens, of all ranks, in nats.
  double norm = 0;
  double clip_coefficient = 1;
  bool applied = false;
  std::string skip_reason;
  double seconds = 0;
  double tokens_per_second = 0;  // Of all ranks.
  StepTimes times;
};

struct TrainerParts {
  Model& model;
  const TextData& data;
  const TrainingJob& job;
  Collective& collective;
  GradientStaging& staging;
  StepOptimizer& optimizer;
};

class Trainer {
 public:
  Trainer(const TrainerOptions& options, const TrainerParts& parts);

  // From the step after the optimizer's last to the last of the
  // options; `on_step` after each. The
  // first error ends it.
  absl::Status Run(const std::function<void(const StepReport&)>& on_step);

 private:
  absl::StatusOr<StepReport> Step(uint64_t step);
  absl::Status MicroStep(uint64_t step, uint32_t micro_step, StepReport& report);
  absl::Status HandOver(int bucket, uint32_t micro_step, absl::Span<const float> shard);
  absl::Status SealAndReceive(StepReport& report);
  absl::Status GatherWeights();
  absl::Status SumLoss(StepReport& report);
  client::StepSettings Settings(uint64_t step) const;
  double tokens_per_step() const;

  const TrainerOptions options_;
  Model& model_;
  const TextData& data_;
  const TrainingJob& job_;
  Collective& collective_;
  GradientStaging& staging_;
  StepOptimizer& optimizer_;
  BucketReducer reducer_;  // Last: its thread uses the others.
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINER_H_
