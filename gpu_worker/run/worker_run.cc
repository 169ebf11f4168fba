#include "gpu_worker/run/worker_run.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/collective/agreement.h"
#include "gpu_worker/collective/share.h"
#include "gpu_worker/cpu/cpu_backend.h"
#include "gpu_worker/cpu/cpu_gpt.h"
#include "gpu_worker/run/loss_log.h"
#include "gpu_worker/run/run_output.h"
#include "gpu_worker/training/local_optimizer.h"
#include "gpu_worker/training/scalar_arithmetic.h"

namespace ballast::worker {
namespace {

absl::Status Validate(const TrainerOptions& options) {
  if (options.batch < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--batch=", options.batch, " must be at least 1"));
  }
  if (options.micro_steps < 1)
    return absl::InvalidArgumentError("--micro-steps must be at least 1");
  return Annotate(Trainer::Validate(options), "the loss scale's flags");
}

int64_t TokensOfARank(const WorkerOptions& options, int world_size) {
  // No rank has more: samples are dealt out in turn (TokenData::Slice).
  const int64_t sequences = DivideUp(int64_t{options.trainer.batch}, world_size);
  return sequences * options.model.context;
}

std::string SizeFlags(const WorkerOptions& options) {
  return absl::StrCat("--batch=", options.trainer.batch, " of --context=", options.model.context,
                      " with --layers=", options.model.layers, " of --width=", options.model.width);
}

// The CPU's backend indexes activations with ints.
absl::Status CheckIndices(const WorkerOptions& options, int world_size) {
  const GptConfig& model = options.model;
  // A token has these numbers of elements in hidden, in the probabilities of attention and in the
  // logits. The products fit an int, since Validate(GptConfig) has bounded their factors.
  const int64_t widest = std::max({4 * model.width, model.heads * model.context, model.vocabulary});
  if (TokensOfARank(options, world_size) <= std::numeric_limits<int>::max() / widest) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(SizeFlags(options), " is more than a rank can index; choose a smaller --batch"));
}

// The CPU's backend must fit its host. Roughly: weights and gradients, and for each token of a
// micro-step the logits and what a block's backward pass needs.
absl::Status CheckHostMemory(const WorkerOptions& options, int world_size) {
  const GptConfig& model = options.model;
  const double tokens = TokensOfARank(options, world_size);
  const double width = model.width;
  // The arithmetic is in double, so that no product overflows. A block has 12 width^2 weights: qkv
  // 3, attention out 1, the MLP 4 and 4.
  const double parameters = (12.0 * model.layers * width + model.vocabulary) * width;
  // CpuGpt::BlockActivations has 20 widths for a token, besides the probabilities.
  const double activations = model.layers * (20 * width + model.heads * model.context);
  const double bytes = parameters * (sizeof(uint16_t) + sizeof(float)) +
                       tokens * (activations + model.vocabulary) * sizeof(float);
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  if (bytes <= memory) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(SizeFlags(options), " needs about ",
                                                 bytes / (1 << 30), " GiB a rank, this host has ",
                                                 memory / (1 << 30), "; choose smaller ones"));
}

absl::Status CheckVocabulary(const WorkerOptions& options, const TokenData& data) {
  if (data.vocabulary() <= options.model.vocabulary) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--text=", options.text, " needs a vocabulary of ", data.vocabulary(), ", but the model has ",
      options.model.vocabulary, "; choose another --model, or a plain text"));
}

// What all ranks must have been started with for their collectives to fit each other.
std::vector<AgreedSetting> SettingsToAgreeOn(const WorkerOptions& options, const TokenData& data) {
  const TrainerOptions& trainer = options.trainer;
  const LearningRateSchedule& rate = trainer.learning_rate;
  const client::LossScalerOptions scaler =
      trainer.loss_scaler.value_or(client::LossScalerOptions{});
  // What is not whole is written with %a: StrCat has six digits, and two numbers that differ may
  // look alike.
  return {{"--layers", absl::StrCat(options.model.layers)},
          {"--heads", absl::StrCat(options.model.heads)},
          {"--width", absl::StrCat(options.model.width)},
          {"--context", absl::StrCat(options.model.context)},
          {"the vocabulary of --model", absl::StrCat(options.model.vocabulary)},
          {"--device", options.backend_name},
          {"--collective", options.collective_name},
          {"WORLD_SIZE", absl::StrCat(options.job.world_size)},
          {"--optimizer", options.optimizer_name},
          {"--service", options.services},
          {"--resume", options.resumes ? "given" : ""},
          {"--job", options.job.name},
          {"--batch", absl::StrCat(trainer.batch)},
          {"--micro-steps", absl::StrCat(trainer.micro_steps)},
          {"--steps", absl::StrCat(trainer.steps)},
          {"--seed", absl::StrCat(trainer.seed)},
          {"--lr", absl::StrFormat("%a %a", rate.peak, rate.final_fraction)},
          {"--warmup-steps", absl::StrCat(rate.warmup_steps)},
          {"--decay-end", absl::StrCat(rate.decay_end)},
          {"--weight-decay", absl::StrFormat("%a", options.job.weight_decay)},
          // Three in one: kMaxAgreedSettings is reached.
          {"--optimizer-rule, --newton-schulz or --state",
           absl::StrCat(RowOf(options.job.rule).name, " ",
                        static_cast<int>(options.job.newton_schulz), " ", Name(options.job.state))},
          {"--max-norm", absl::StrFormat("%a", trainer.max_norm)},
          {"--bucket-elements", absl::StrCat(options.job.bucket_elements)},
          {"--chunk-elements", absl::StrCat(options.job.chunk_elements)},
          {"--wire-dtype", std::string(Name(options.job.wire_dtype))},
          {"--dtype", std::string(Name(options.job.weights_dtype))},
          {"--accumulate", absl::StrCat(static_cast<int>(options.accumulation))},
          {"--initial-scale-power", absl::StrCat(scaler.initial_scale_power)},
          {"--loss-scale-window", absl::StrCat(scaler.window)},
          {"--loss-scale-hysteresis", absl::StrCat(scaler.hysteresis)},
          {"--min-loss-scale", absl::StrFormat("%a", scaler.min_scale)},
          {"--text (its contents)", absl::StrCat(data.Fingerprint())}};
}

absl::StatusOr<RunFacts> FactsOf(const WorkerOptions& options, const Collective& collective,
                                 const LossLog& losses, StepOptimizer& optimizer) {
  RunFacts facts{.reports = losses.reports(),
                 .steps = optimizer.committed_step(),
                 .micro_steps = options.trainer.micro_steps,
                 .workers = collective.world_size(),
                 .optimizer = options.optimizer_name,
                 .transport = optimizer.transport(),
                 .counts = std::nullopt};
  absl::StatusOr<client::JobCounts> counts = optimizer.ReadCounts();
  // The local optimizer has no counts, which is no error.
  if (absl::IsUnimplemented(counts.status())) return facts;
  BALLAST_ASSIGN_OR_RETURN(facts.counts, std::move(counts));
  return facts;
}

absl::Status LeaveOutput(const WorkerOptions& options, const Collective& collective,
                         LossLog& losses, const TrainingJob& job, TrainingBackend& backend,
                         StepOptimizer& optimizer) {
  BALLAST_ASSIGN_OR_RETURN(const RunFacts facts, FactsOf(options, collective, losses, optimizer));
  return WriteOutput(options.out, facts, job, backend);
}

// `mine`, or which other rank has an error there, so that no rank goes on to the service and waits
// for it.
absl::Status OnAllRanks(const absl::Status& mine, Collective& collective) {
  // A rank takes part with an error of its own, too: the others are in this collective.
  const auto ready = Share(uint64_t{mine.ok()}, collective);
  BALLAST_RETURN_IF_ERROR(mine);
  BALLAST_RETURN_IF_ERROR(ready.status());
  const auto failed = std::find(ready->begin(), ready->end(), uint64_t{0});
  if (failed == ready->end()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", failed - ready->begin(), " could not begin; see its error"));
}

// The options that follow from others, once those are known to work.
absl::StatusOr<WorkerOptions> Complete(WorkerOptions options, const Collective& collective) {
  // The order matters: the later checks multiply what the earlier ones have bounded.
  BALLAST_RETURN_IF_ERROR(worker::Validate(options.model));
  BALLAST_RETURN_IF_ERROR(Validate(options.trainer));
  if (!options.make_backend) {
    BALLAST_RETURN_IF_ERROR(CheckIndices(options, collective.world_size()));
    BALLAST_RETURN_IF_ERROR(CheckHostMemory(options, collective.world_size()));
    options.make_backend = MakeCpuBackend;
  }
  // Batches have the full context.
  options.trainer.context = options.model.context;
  options.job.world_size = collective.world_size();
  options.job.micro_steps = options.trainer.micro_steps_of_step ? 0 : options.trainer.micro_steps;
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrainingBackend>> MakeCpuBackend(const WorkerOptions& options,
                                                                const TrainingJob& job,
                                                                Collective& collective) {
  return std::make_unique<CpuBackend>(CpuBackendOptions{.accumulation = options.accumulation,
                                                        .check_gradients = options.check_gradients,
                                                        .timeout = options.seal_timeout,
                                                        .timeline = options.timeline},
                                      MakeCpuGpt(options.model), job, collective);
}

absl::StatusOr<std::unique_ptr<StepOptimizer>> MakeLocalOptimizer(const TrainingJob& job,
                                                                  TrainingBackend& backend,
                                                                  Collective& collective) {
  return std::make_unique<LocalOptimizer>(
      job.spec, job.layout, collective,
      std::make_unique<ScalarArithmetic>(job.spec.groups, job.layout,
                                         [&backend](int chunk) { return backend.weights(chunk); }));
}

absl::Status RunWorker(WorkerOptions asked, Collective& collective,
                       const MakeOptimizer& make_optimizer,
                       const std::function<void(const StepReport&)>& on_step) {
  BALLAST_ASSIGN_OR_RETURN(const WorkerOptions options, Complete(std::move(asked), collective));
  // The text is read before the agreement, of which its contents are a part.
  BALLAST_ASSIGN_OR_RETURN(const TokenData data,
                           TokenData::Read(options.text, options.model.context));
  BALLAST_RETURN_IF_ERROR(CheckAgreement(SettingsToAgreeOn(options, data), collective));
  // The ranks have the same text and model now, so they all go on or none does.
  BALLAST_RETURN_IF_ERROR(CheckVocabulary(options, data));
  const bool writes_output = collective.rank() == 0 && !options.out.empty();
  // A directory that cannot be written is noticed now and not after hours of training.
  if (writes_output) BALLAST_RETURN_IF_ERROR(PrepareOutput(options.out));

  BALLAST_ASSIGN_OR_RETURN(const TrainingJob job,
                           MakeTrainingJob(GptParameters(options.model), options.job));
  const absl::StatusOr<std::unique_ptr<TrainingBackend>> made =
      options.make_backend(options, job, collective);
  BALLAST_RETURN_IF_ERROR(OnAllRanks(made.status(), collective));
  const std::unique_ptr<TrainingBackend>& backend = *made;
  // It is declared after the backend and so is destroyed first: it still has the backend's
  // payloads. The trainer, which has both, goes before them.
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<StepOptimizer> optimizer,
                           make_optimizer(job, *backend, collective));
  const InitialValues initial_values = [&](int parameter, int64_t offset,
                                           absl::Span<float> values) {
    GptInitialValues(options.model, options.trainer.seed, parameter, offset, values);
  };
  Trainer trainer(options.trainer, {.backend = *backend,
                                    .data = data,
                                    .job = job,
                                    .initial_values = initial_values,
                                    .collective = collective,
                                    .optimizer = *optimizer,
                                    .timeline = options.timeline});
  BALLAST_RETURN_IF_ERROR(trainer.Join());

  // The log is opened after the join, which tells the job's step: it decides which old lines are
  // kept.
  std::unique_ptr<LossLog> losses;
  if (writes_output) {
    BALLAST_ASSIGN_OR_RETURN(losses, LossLog::Open(options.out, optimizer->committed_step()));
  }
  BALLAST_RETURN_IF_ERROR(trainer.Run([&](const StepReport& report) {
    on_step(report);
    // This is the last thing of a step: no later one is sealed before this line is written.
    return losses != nullptr ? losses->Append(report) : absl::OkStatus();
  }));

  // No rank leaves while another is still in its last collective.
  BALLAST_RETURN_IF_ERROR(collective.Barrier());
  // A failure of either leaves the other's result.
  absl::Status status;
  if (writes_output) {
    status = LeaveOutput(options, collective, *losses, job, *backend, *optimizer);
  }
  // One rank is enough: the service has all ranks' state.
  if (collective.rank() == 0 && !options.save_directory.empty()) {
    status.Update(optimizer->SaveCheckpoint(options.save_directory));
    // If anything is missing, the job stays, and the next start has the rest.
    if (options.close_at_end && status.ok()) status = optimizer->CloseJob();
  }
  return status;
}

}  // namespace ballast::worker
