// One worker's run from options to output: job, backend, optimizer, training, files. The binary
// adds flags and the choice of a backend and of an optimizer.
#ifndef BALLAST_GPU_WORKER_RUN_WORKER_RUN_H_
#define BALLAST_GPU_WORKER_RUN_WORKER_RUN_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "gpu_worker/base/data.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/buckets/bucket_reducer.h"
#include "gpu_worker/collective/collective.h"
#include "gpu_worker/gpt/architecture.h"
#include "gpu_worker/run/run_output.h"
#include "gpu_worker/training/backend.h"
#include "gpu_worker/training/optimizer.h"
#include "gpu_worker/training/trainer.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

struct WorkerOptions;

// `job` and `collective` outlive the backend; `options` need not.
using MakeBackend = std::function<absl::StatusOr<std::unique_ptr<TrainingBackend>>(
    const WorkerOptions& options, const TrainingJob& job, Collective& collective)>;

struct WorkerOptions {
  GptConfig model;
  TrainerOptions trainer;
  TrainingJobOptions job;  // world_size and micro_steps are those of the collective and `trainer`.
  MakeBackend make_backend;  // Nullable: then the CPU's.
  // The values of --device and --collective; the same on all ranks.
  std::string backend_name = "cpu";
  std::string collective_name = "auto";
  Accumulation accumulation = Accumulation::kService;
  // Searches this rank's own gradients for non-finite elements before the reduction.
  bool check_gradients = false;
  std::string text = kDefaultText;
  // How long a gradient waits for the optimizer to release the previous one.
  absl::Duration seal_timeout = client::SessionOptions().seal_timeout;
  std::string optimizer_name;    // For worker.json.
  std::string services;          // What all ranks must have in common of --service.
  bool resumes = false;          // The optimizer loads a checkpoint first; on all ranks or on none.
  std::string out;               // Directory for rank 0's files; empty: none.
  std::string save_directory;    // The optimizer saves its state there at the end; empty: none.
  bool close_at_end = false;     // After that the job is closed. Needs save_directory.
  Timeline* timeline = nullptr;  // Nullable. Borrowed.
};

// The optimizer writes weights to the places of `backend`. Its arguments outlive it.
using MakeOptimizer = std::function<absl::StatusOr<std::unique_ptr<StepOptimizer>>(
    const TrainingJob& job, TrainingBackend& backend, Collective& collective)>;

// Trains from the job's committed step on and writes the output; for a job at its last step, only
// writes the output. `on_step` is called on every rank, after each step. Errors are one line with a
// remedy.
absl::Status RunWorker(WorkerOptions options, Collective& collective,
                       const MakeOptimizer& make_optimizer,
                       const std::function<void(const StepReport&)>& on_step);

// A CpuBackend for RunWorker.
absl::StatusOr<std::unique_ptr<TrainingBackend>> MakeCpuBackend(const WorkerOptions& options,
                                                                const TrainingJob& job,
                                                                Collective& collective);

// A LocalOptimizer with the scalar arithmetic for RunWorker, where weights are in host memory.
absl::StatusOr<std::unique_ptr<StepOptimizer>> MakeLocalOptimizer(const TrainingJob& job,
                                                                  TrainingBackend& backend,
                                                                  Collective& collective);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_WORKER_RUN_H_
