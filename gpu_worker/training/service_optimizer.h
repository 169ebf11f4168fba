// The optimizer service as a StepOptimizer.
#ifndef BALLAST_GPU_WORKER_TRAINING_SERVICE_OPTIMIZER_H_
#define BALLAST_GPU_WORKER_TRAINING_SERVICE_OPTIMIZER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "gpu_worker/collective/collective.h"
#include "gpu_worker/training/backend.h"
#include "gpu_worker/training/optimizer.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

struct ServiceOptimizerOptions {
  const TrainingJob& job;  // Chunks are named by their index in its layout.
  // Receives the weights, or, if it gathers ahead, takes them from the session's memory; is
  // notified of each chunk. Borrowed.
  TrainingBackend& backend;
  // A checkpoint for rank 0 to load into a job without weights, if it exists: a name under the
  // service's --checkpoint-dir, or a path on its host. A job with weights continues with them,
  // because a restarted worker has the same flags. May be empty.
  std::string resume_directory;
  absl::Duration seal_timeout = client::SessionOptions().seal_timeout;
  absl::Duration reconnect_timeout = client::SessionOptions().reconnect_timeout;
  client::SharedMemoryUse shared_memory = client::SharedMemoryUse::kAuto;
  // As in JobSpec: the services that hold the job together. `job` does not have them.
  std::vector<MemberSpec> members = {};
  std::vector<int> homes = {};
};

// Loads the checkpoint, if required; Join opens this rank's session. Errors as in Session::Open and
// LoadCheckpoint. After an error of the latter the job is closed, so that no empty job remains.
// Join returns FAILED_PRECONDITION if its previous job was closed. The channel leads to the rank's
// home.
absl::StatusOr<std::unique_ptr<StepOptimizer>> MakeServiceOptimizer(
    const std::shared_ptr<grpc::Channel>& channel, ServiceOptimizerOptions options,
    Collective& collective);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_SERVICE_OPTIMIZER_H_
