#include "gpu_worker/worker_run.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/agreement.h"
#include "gpu_worker/local_optimizer.h"
#include "gpu_worker/loss_log.h"
#include "gpu_worker/run_output.h"

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

// Indices of activations are ints, and what a rank keeps must fit its host. Roughly: weights and
// gradients, and for each token of a micro-step what a block's backward pass needs.
absl::Status CheckSize(const GptConfig& model, int batch, int world_size) {
  const int64_t sequences = (int64_t{batch} + world_size - 1) / world_size;
  const int64_t tokens = sequences * model.context;
  const int64_t widest = std::max({4 * model.width, model.heads * model.context, kVocabulary});
  const double width = model.width;
  const double bytes =
      model.layers * (12 * width * width * (sizeof(uint16_t) + sizeof(float)) +
                      tokens * (20 * width + model.heads * model.context) * sizeof(float));
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  if (tokens <= std::numeric_limits<int>::max() / widest && bytes <= memory) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--batch=", batch, " of --context=", model.context, " with --layers=", model.layers,
      " of --width=", model.width, " needs about ", bytes / (1 << 30),
      " GiB a rank, this host has ", memory / (1 << 30), "; choose smaller ones"));
}

// What all ranks must have been started with for their collectives to fit each other.
std::vector<AgreedSetting> SettingsToAgreeOn(const WorkerOptions& options, const TextData& data) {
  const TrainerOptions& trainer = options.trainer;
  const LearningRateSchedule& rate = trainer.learning_rate;
  const client::LossScalerOptions scaler =
      trainer.loss_scaler.value_or(client::LossScalerOptions{});
  return {{"--layers", absl::StrCat(options.model.layers)},
          {"--heads", absl::StrCat(options.model.heads)},
          {"--width", absl::StrCat(options.model.width)},
          {"--context", absl::StrCat(options.model.context)},
          {"WORLD_SIZE", absl::StrCat(options.job.world_size)},
          {"--optimizer", options.optimizer_name},
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
          {"--max-norm", absl::StrFormat("%a", options.job.max_norm)},
          {"--bucket-elements", absl::StrCat(options.job.bucket_elements)},
          {"--chunk-elements", absl::StrCat(options.job.chunk_elements)},
          {"--wire-dtype", std::string(Name(options.job.wire_dtype))},
          {"--dtype", std::string(Name(options.job.weights_dtype))},
          {"--accumulate", absl::StrCat(static_cast<int>(trainer.accumulation))},
          {"--initial-scale-power", absl::StrCat(scaler.initial_scale_power)},
          {"--loss-scale-window", absl::StrCat(scaler.window)},
          {"--loss-scale-hysteresis", absl::StrCat(scaler.hysteresis)},
          {"--min-loss-scale", absl::StrFormat("%a", scaler.min_scale)},
          {"--text (its contents)", data.text()}};
}

std::vector<DType> WireDTypes(const JobSpec& spec) {
  std::vector<DType> dtypes;
  for (const GroupSpec& group : spec.groups) dtypes.push_back(group.wire_dtype);
  return dtypes;
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
  if (absl::IsUnimplemented(counts.status())) return facts;
  BALLAST_ASSIGN_OR_RETURN(facts.counts, std::move(counts));
  return facts;
}

absl::Status LeaveOutput(const WorkerOptions& options, const Collective& collective,
                         LossLog& losses, const TrainingJob& job, Model& model,
                         StepOptimizer& optimizer) {
  BALLAST_ASSIGN_OR_RETURN(const RunFacts facts, FactsOf(options, collective, losses, optimizer));
  losses.Finish();
  return WriteOutput(options.out, facts, job, model);
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepOptimizer>> MakeLocalOptimizer(const TrainingJob& job,
                                                                  WeightsAt weights,
                                                                  Collective& collective) {
  return std::make_unique<LocalOptimizer>(job.spec, job.layout, collective, std::move(weights));
}

absl::Status RunWorker(WorkerOptions options, Collective& collective,
                       const MakeOptimizer& make_optimizer,
                       const std::function<void(const StepReport&)>& on_step) {
  BALLAST_RETURN_IF_ERROR(worker::Validate(options.model));
  BALLAST_RETURN_IF_ERROR(Validate(options.trainer));
  BALLAST_RETURN_IF_ERROR(CheckSize(options.model, options.trainer.batch, collective.world_size()));
  options.trainer.context = options.model.context;
  options.job.world_size = collective.world_size();
  options.job.micro_steps = options.trainer.micro_steps_of_step ? 0 : options.trainer.micro_steps;
  BALLAST_ASSIGN_OR_RETURN(const TextData data,
                           TextData::Read(options.text, options.model.context));
  BALLAST_RETURN_IF_ERROR(CheckAgreement(SettingsToAgreeOn(options, data), collective));
  const bool writes_output = collective.rank() == 0 && !options.out.empty();
  if (writes_output) BALLAST_RETURN_IF_ERROR(PrepareOutput(options.out));

  const std::unique_ptr<Model> model = MakeCpuGpt(options.model, options.trainer.seed);
  BALLAST_ASSIGN_OR_RETURN(const TrainingJob job, MakeTrainingJob(*model, options.job));
  model->Place(job.layout, job.group_elements, options.job.weights_dtype);
  GradientStaging staging(job.layout, WireDTypes(job.spec), collective.rank(),
                          options.seal_timeout);
  const WeightsAt weights = [&](int chunk_index) {
    const Chunk& chunk = job.layout.chunks()[chunk_index];
    return WeightBytes(*model, chunk.group, chunk.begin, chunk.elements);
  };
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<StepOptimizer> optimizer,
                           make_optimizer(job, weights, collective));
  Trainer trainer(options.trainer, {.model = *model,
                                    .data = data,
                                    .job = job,
                                    .collective = collective,
                                    .staging = staging,
                                    .optimizer = *optimizer});
  BALLAST_RETURN_IF_ERROR(trainer.Join());

  std::unique_ptr<LossLog> losses;
  TrainerEvents events;
  if (writes_output) {
    BALLAST_ASSIGN_OR_RETURN(
        losses, LossLog::Open(options.out, optimizer->job_uid(), optimizer->committed_step()));
    events.on_sealing = [&](uint64_t step, double loss) { return losses->Note(step, loss); };
  }
  events.on_step = [&](const StepReport& report) {
    on_step(report);
    return losses != nullptr ? losses->Append(report) : absl::OkStatus();
  };
  BALLAST_RETURN_IF_ERROR(trainer.Run(events));

  // Nobody leaves while another is still in its last collective.
  BALLAST_RETURN_IF_ERROR(collective.Barrier());
  // A failure of either leaves the other's result.
  absl::Status status;
  if (writes_output) {
    status = LeaveOutput(options, collective, *losses, job, *model, *optimizer);
  }
  if (collective.rank() == 0 && !options.save_directory.empty()) {
    status.Update(optimizer->SaveCheckpoint(options.save_directory));
  }
  return status;
}

}  // namespace ballast::worker
