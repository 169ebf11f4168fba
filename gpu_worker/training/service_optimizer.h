// The optimizer service as a StepOptimizer.
#ifndef BALLAST_GPU_WORKER_TRAINING_SERVICE_OPTIMIZER_H_
#define BALLAST_GPU_WORKER_TRAINING_SERVICE_OPTIMIZER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "gpu_worker/collective/collective.h"
#include "gpu_worker/training/backend.h"
#include "gpu_worker/training/optimizer.h"

namespace ballast::worker {

struct ServiceOptimizerOptions {
  JobSpec job;
  // Receives the weights, or, where it gathers ahead, takes them from the session's memory; is
  // notified of each chunk. Borrowed.
  TrainingBackend& backend;
  // A checkpoint for rank 0 to load into a job that has no weights yet, if there is one: a name
  // under the service's --checkpoint-dir, or a path on its host. A job that has weights goes on
  // from them: a restarted worker has the same flags. Empty: none.
  std::string resume_directory;
  absl::Duration seal_timeout = client::SessionOptions().seal_timeout;
  absl::Duration reconnect_timeout = client::SessionOptions().reconnect_timeout;
  client::SharedMemoryUse shared_memory = client::SharedMemoryUse::kAuto;
};

// Loads the checkpoint, if one is to be loaded; Join opens this rank's session. Errors are those of
// Session::Open and LoadCheckpoint; after one of the latter the job is closed, so that no empty one
// is left. Join returns FAILED_PRECONDITION if the job that it joined
// before was closed.
absl::StatusOr<std::unique_ptr<StepOptimizer>> MakeServiceOptimizer(
    const std::shared_ptr<grpc::Channel>& channel, ServiceOptimizerOptions options,
    Collective& collective);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_SERVICE_OPTIMIZER_H_
