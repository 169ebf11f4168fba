#include "gpu_worker/worker_run.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/local_optimizer.h"
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
  return absl::OkStatus();
}

std::vector<DType> WireDTypes(const JobSpec& spec) {
  std::vector<DType> dtypes;
  for (const GroupSpec& group : spec.groups) dtypes.push_back(group.wire_dtype);
  return dtypes;
}

absl::Status CheckNotFinished(const StepOptimizer& optimizer, const WorkerOptions& options) {
  if (optimizer.committed_step() < options.trainer.steps) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("job ", options.job.name, " is at step ", optimizer.committed_step(),
                   " already; ask for more with --steps, or start another with --job"));
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
  options.trainer.context = options.model.context;
  options.job.world_size = collective.world_size();
  options.job.micro_steps = options.trainer.micro_steps;
  BALLAST_ASSIGN_OR_RETURN(const TextData data,
                           TextData::Read(options.text, options.model.context));
  const bool writes_output = collective.rank() == 0 && !options.out.empty();
  if (writes_output) BALLAST_RETURN_IF_ERROR(PrepareOutput(options.out));

  const std::unique_ptr<Model> model = MakeCpuGpt(options.model, options.trainer.seed);
  BALLAST_ASSIGN_OR_RETURN(const TrainingJob job, MakeTrainingJob(*model, options.job));
  model->Place(job.layout, job.group_elements);
  GradientStaging staging(job.layout, WireDTypes(job.spec), collective.rank());
  const WeightsAt weights = [&](int chunk_index) {
    const Chunk& chunk = job.layout.chunks()[chunk_index];
    return WeightBytes(*model, chunk.group, chunk.begin, chunk.elements);
  };
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<StepOptimizer> optimizer,
                           make_optimizer(job, weights, collective));
  BALLAST_RETURN_IF_ERROR(CheckNotFinished(*optimizer, options));

  RunFacts facts{.reports = {},
                 .micro_steps = options.trainer.micro_steps,
                 .workers = collective.world_size(),
                 .optimizer = options.optimizer_name};
  Trainer trainer(options.trainer, {.model = *model,
                                    .data = data,
                                    .job = job,
                                    .collective = collective,
                                    .staging = staging,
                                    .optimizer = *optimizer});
  BALLAST_RETURN_IF_ERROR(trainer.Run([&](const StepReport& report) {
    facts.reports.push_back(report);
    on_step(report);
  }));

  // Nobody leaves while another is still in its last collective.
  BALLAST_RETURN_IF_ERROR(collective.Barrier());
  if (collective.rank() == 0 && !options.save_directory.empty()) {
    BALLAST_RETURN_IF_ERROR(optimizer->SaveCheckpoint(options.save_directory));
  }
  return writes_output ? WriteOutput(options.out, facts, job, *model) : absl::OkStatus();
}

}  // namespace ballast::worker
