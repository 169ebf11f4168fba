// The flags of ballast-worker, read and checked.
#ifndef BALLAST_GPU_WORKER_RUN_WORKER_FLAGS_H_
#define BALLAST_GPU_WORKER_RUN_WORKER_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/credentials.h"
#include "client/session.h"
#include "gpu_worker/run/worker_run.h"

namespace ballast::worker {

enum class DeviceKind : uint8_t { kCpu, kCuda };
enum class OptimizerKind : uint8_t { kService, kLocal };
// How GPUs exchange data. kAuto: Gloo if two ranks share a GPU, else NCCL.
enum class CollectiveKind : uint8_t { kAuto, kNccl, kGloo };

// As --service: the lasting service of each node.
inline constexpr char kNodeService[] = "node";

struct WorkerFlags {
  WorkerOptions options;  // Without make_backend.
  DeviceKind device = DeviceKind::kCpu;
  CollectiveKind collective = CollectiveKind::kAuto;
  OptimizerKind optimizer = OptimizerKind::kService;
  // An address, several with commas between, kNodeService, or "in-process".
  std::string service;
  client::Credentials credentials;  // Those of the environment where a flag is not given.
  std::string resume;               // A checkpoint's directory; empty: none.
  client::SharedMemoryUse shared_memory = client::SharedMemoryUse::kAuto;
  absl::Duration reconnect_timeout;
  absl::Duration peer_timeout;
  std::string trace;  // A file; empty: none.
  int threads = 1;
};

// INVALID_ARGUMENT, naming the flag and its possible values. --help prints and ends the process.
absl::StatusOr<WorkerFlags> ReadWorkerFlags(int argc, char** argv);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_WORKER_FLAGS_H_
