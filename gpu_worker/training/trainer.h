// The training loop of one rank; trainer.cc follows a step from top to bottom.
//
//   Trainer trainer(options, {.backend = ..., .data = ..., ...});
//   trainer.Join();
//   trainer.Run([](const StepReport& report) { ... });
//
// A step that the optimizer takes back (ABORTED, on any rank: an operator's abort or load, another
// process in some rank) is lost on all ranks. A rank that is notified goes on taking part in the
// step's collectives, so that none waits for it; before the seal and after the decision the ranks
// share what they know, and if one lost the step all join again and go on from the committed step.
//
// Threads: one caller. Everything in TrainerParts is borrowed until destruction. The backend calls
// the optimizer from its own threads while a step's passes are in progress.
#ifndef BALLAST_GPU_WORKER_TRAINING_TRAINER_H_
#define BALLAST_GPU_WORKER_TRAINING_TRAINER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/loss_scaler.h"
#include "client/session.h"
#include "gpu_worker/base/data.h"
#include "gpu_worker/base/stopwatch.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/collective/collective.h"
#include "gpu_worker/training/backend.h"
#include "gpu_worker/training/learning_rate.h"
#include "gpu_worker/training/optimizer.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

struct TrainerOptions {
  uint64_t steps = 80;  // The last one.
  uint32_t micro_steps = 2;
  // The micro-steps of each step, if steps differ. The same on all ranks. Nullable.
  std::function<uint32_t(uint64_t step)> micro_steps_of_step;
  int batch = 12;     // Sequences in a micro-step, of all ranks together.
  int context = 128;  // Tokens in a sequence.
  uint64_t seed = 1;
  LearningRateSchedule learning_rate;
  double max_norm = 0;  // Gradients are clipped to this global norm; 0: not.
  // Scales the loss, for fp16 gradients; nullopt: no scaling.
  std::optional<client::LossScalerOptions> loss_scaler;
};

// The seconds of a step on this rank: of the training thread, or, while a GPU's passes run, of that
// GPU. Reducing and sending happen while backward goes on; their entries are only the waits that
// remain.
struct StepTimes {
  double compute = 0;  // Forward and backward.
  double reduce = 0;   // Waiting for the last buckets' reduce-scatter.
  double send = 0;     // Waiting for the last gradients to be handed over, and for the decision.
  double update = 0;  // The optimizer's arithmetic, from the decision on. With Muon's second round.
  double receive = 0;  // Waiting for new weights beyond that, and the all-gather. Where the next
                       // step's passes begin meanwhile, that step has these waits; and what else
                       // kept a GPU from its first pass.

  // Seconds in which no pass ran: from the end of the last one, and in waits of earlier ones, until
  // the next one had its weights.
  double exposed() const { return reduce + send + update + receive; }
};

struct StepReport {
  uint64_t step = 0;
  double loss = 0;  // Mean over the step's tokens, of all ranks, in nats.
  // These two are NaN if the step was committed without notice to any rank.
  double norm = 0;
  double clip_coefficient = 1;
  double loss_scale = 1;
  bool applied = false;
  std::string skip_reason;
  double seconds = 0;
  double tokens_per_second = 0;  // All ranks together.
  StepTimes times;
};

struct TrainerParts {
  TrainingBackend& backend;
  const TokenData& data;
  const TrainingJob& job;
  InitialValues initial_values;
  Collective& collective;
  StepOptimizer& optimizer;
  Timeline* timeline = nullptr;  // Nullable.
};

// The step is committed. After a load of an older checkpoint, steps are repeated. An error ends the
// training.
using OnStep = std::function<absl::Status(const StepReport& report)>;

class Trainer {
 public:
  // The most attempts in a row at a step, and at joining, before it is an error.
  static constexpr int kMaxAttempts = 100;

  // INVALID_ARGUMENT if the loss scaler's options or the clipping are invalid.
  static absl::Status Validate(const TrainerOptions& options);

  // `options` are valid. Starts the backend.
  Trainer(const TrainerOptions& options, const TrainerParts& parts);
  // The backend releases the optimizer's memory.
  ~Trainer();

  // Joins the job; afterwards all ranks are at the same committed step, with its weights.
  // FAILED_PRECONDITION if that is past the last step of the options.
  absl::Status Join();
  // From the step after the optimizer's last to the last of the options. The first error ends it.
  absl::Status Run(const OnStep& on_step);

 private:
  // The step in progress.
  struct Attempt {
    StepReport report;
    uint32_t micro_steps = 1;
    bool sealing = false;                    // All ranks went on to seal it.
    bool decided = false;                    // A rank has its decision.
    bool gathered = false;                   // Its weights were gathered as they arrived.
    Timeline::Clock::time_point decided_at;  // On this rank.
  };

  absl::Status Step(uint64_t step, const OnStep& on_step);
  void StartAttempt(uint64_t step);
  absl::Status Passes();
  absl::Status MicroStep(uint32_t micro_step);
  Batch BatchOf(uint64_t step, uint32_t micro_step) const;
  absl::Status PrepareNextBatch();
  void NoteInGap(double& entry, double seconds);
  void NoteReceiving(double seconds);
  absl::Status SumLoss();
  absl::Status Report();
  absl::Status Seal();
  absl::Status Orthogonalize(uint64_t step);
  absl::Status Receive();
  absl::Status ReceiveWeights();
  absl::Status ReceiveUnderNextForward();
  absl::Status StartNextForward();
  absl::Status ShareDecision();
  absl::Status JoinAgain();
  absl::Status EndSecondRound();
  absl::Status UseOptimizersMemory();
  absl::Status LeaveOptimizersMemory();
  void LogTransportIfNew();
  absl::Status PastTheLastStep() const;
  absl::StatusOr<bool> JoinedTogether(bool joined);
  absl::Status RestoreScaler();
  absl::Status UnlessLost(const absl::Status& status);
  void Lose(absl::string_view because);
  uint32_t MicroStepsOf(uint64_t step) const;
  StepSettings Settings() const;
  double loss_scale() const { return scaler_.has_value() ? scaler_->scale() : 1.0; }
  double tokens_per_step() const;

  const TrainerOptions options_;
  TrainingBackend& backend_;
  const TokenData& data_;
  const TrainingJob& job_;
  const InitialValues initial_values_;
  Collective& collective_;
  StepOptimizer& optimizer_;
  Timeline* const timeline_;
  std::optional<client::DynamicLossScaler> scaler_;
  Attempt attempt_;
  int attempts_in_a_row_ = 0;
  Batch next_batch_;  // The first of step next_batch_of_.
  uint64_t next_batch_of_ = 0;
  double gap_noted_ = 0;        // Seconds told since the last pass, in which none ran.
  bool forward_ahead_ = false;  // The next step's began while its weights arrived.
  std::string transport_;       // At the last Join.
  Stopwatch since_seal_;        // Or since the loop began.
  double exposed_to_seal_ = 0;  // StepTimes::exposed of the step in progress, up to its seal,
  double waited_ = 0;           // and what it was of the last one after that.

  // The optimizer has taken back the step in progress: on this rank, then on any. The last error
  // that notified this rank; empty: another rank's.
  std::optional<std::string> lost_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_TRAINER_H_
