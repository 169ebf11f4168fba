// device_collective.h by NCCL: one rank to a GPU, in one process or many.
#ifndef BALLAST_GPU_WORKER_CUDA_NCCL_COLLECTIVE_H_
#define BALLAST_GPU_WORKER_CUDA_NCCL_COLLECTIVE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gpu_worker/collective/collective.h"
#include "gpu_worker/cuda/cuda_device.h"
#include "gpu_worker/device/device_collective.h"

namespace ballast::worker {

// Connects to all other ranks of `host`, which must do the same; `host` is used only during the
// call. `device` is borrowed until destruction. No wait for another rank exceeds `timeout`: a
// watchdog ends it (device/watchdog.h).
//
// FAILED_PRECONDITION if the library is missing or two ranks have one GPU, UNAVAILABLE or
// DEADLINE_EXCEEDED if the ranks do not find each other.
absl::StatusOr<std::unique_ptr<DeviceCollective>> ConnectNccl(CudaDevice& device, Collective& host,
                                                              absl::Duration timeout);

// Whether two ranks use one GPU, which NCCL refuses. A collective of `host`: the same on all ranks.
absl::StatusOr<bool> ShareGpus(const CudaDevice& device, Collective& host);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_NCCL_COLLECTIVE_H_
