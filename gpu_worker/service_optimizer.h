// The optimizer service as a StepOptimizer.
#ifndef BALLAST_GPU_WORKER_SERVICE_OPTIMIZER_H_
#define BALLAST_GPU_WORKER_SERVICE_OPTIMIZER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "gpu_worker/collective.h"
#include "gpu_worker/optimizer.h"

namespace ballast::worker {

struct ServiceOptimizerOptions {
  JobSpec job;
  WeightsAt weights;
  std::string resume_directory;  // A checkpoint to load first, on the service's host; empty: none.
};

// Opens this rank's session. With a directory to resume from, rank 0 has the service load it before
// any rank joins. Errors are those of Session::Open and LoadCheckpoint.
absl::StatusOr<std::unique_ptr<StepOptimizer>> OpenServiceOptimizer(
    const std::shared_ptr<grpc::Channel>& channel, ServiceOptimizerOptions options,
    Collective& collective);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_SERVICE_OPTIMIZER_H_
