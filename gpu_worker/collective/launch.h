// A worker's environment: the variables that torchrun sets.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_LAUNCH_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_LAUNCH_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "gpu_worker/collective/collective.h"

namespace ballast::worker {

struct Launch {
  int rank = 0;                           // RANK
  int world_size = 1;                     // WORLD_SIZE
  int local_rank = 0;                     // LOCAL_RANK, on this host; RANK if it is not set.
  std::string master_host = "127.0.0.1";  // MASTER_ADDR
  int master_port = 29500;                // MASTER_PORT
};

// INVALID_ARGUMENT with the variable that is not a number or out of range. `variable` returns the
// value of an environment variable, if it is set.
absl::StatusOr<Launch> ReadLaunch(
    const std::function<std::optional<std::string>(const std::string&)>& variable);
// The same from this process's environment.
absl::StatusOr<Launch> ReadLaunch();

struct Workers {
  std::unique_ptr<Collective> collective;  // Gloo; of a world of one, without it.
  std::string own_host;                    // The address at which the others reach this one.
};
// Connects the workers of the launch.
absl::StatusOr<Workers> ConnectWorkers(const Launch& launch, std::chrono::milliseconds timeout);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_LAUNCH_H_
