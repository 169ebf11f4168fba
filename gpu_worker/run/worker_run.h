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

// What it is given outlives the backend, but for the options.
using MakeBackend = std::function<absl::StatusOr<std::unique_ptr<TrainingBackend>>(
    const WorkerOptions& options, const TrainingJob& job, Collective& collective)>;

struct WorkerOptions {
  GptConfig model;
  TrainerOptions trainer;
  TrainingJobOptions
      job;  // world_size and micro_steps are taken from the collective and `trainer`.
  MakeBackend make_backend;              // Null: the CPU's.
  std::string backend_name = "cpu";      // As --device says it; the same on all ranks, as the next.
  std::string collective_name = "auto";  // As --collective says it.
  Accumulation accumulation = Accumulation::kService;
  // Searches this rank's own gradients for elements that are not finite before they are reduced.
  bool check_gradients = false;
  std::string text = kDefaultText;
  // How long a gradient waits for the optimizer to take the one before it.
  absl::Duration seal_timeout = client::SessionOptions().seal_timeout;
  std::string optimizer_name;  // For worker.json.
  bool resumes = false;        // The optimizer loads a checkpoint first; on all ranks or on none.
  std::string out;             // Directory for rank 0's files; empty: none.
  WeightsFile weights_file = WeightsFile::kWritten;
  std::string
      save_directory;  // The optimizer saves its state there at the end; empty: it does not.
  Timeline* timeline = nullptr;  // Of what this rank does when; may be null. Borrowed.
};

// The optimizer puts weights where `backend` wants them. All that it is given outlives it.
using MakeOptimizer = std::function<absl::StatusOr<std::unique_ptr<StepOptimizer>>(
    const TrainingJob& job, TrainingBackend& backend, Collective& collective)>;

// Trains from where the job stands and leaves the output; a job that has had all its steps leaves
// it again. `on_step` is called on every rank, after each step. Errors are one line that says what
// to do.
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
