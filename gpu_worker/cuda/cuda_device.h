// device.h on an NVIDIA GPU, by the runtime's interface.
#ifndef BALLAST_GPU_WORKER_CUDA_CUDA_DEVICE_H_
#define BALLAST_GPU_WORKER_CUDA_CUDA_DEVICE_H_

#include <array>
#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

class CudaDevice : public Device {
 public:
  // GPU `local_rank` of this host, counted round where there are fewer. FAILED_PRECONDITION, saying
  // what to do, if there is none, the driver is missing or too old, or the kernels are not made for
  // it; UNAVAILABLE if it cannot be used.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Open(int local_rank);

  // How many GPUs this process may use: at least one. Errors are those of Open.
  static absl::StatusOr<int> Count();

  // Makes it the calling thread's, for libraries that are not given a stream.
  virtual absl::Status MakeCurrent() = 0;
  // The same for two ranks that use one GPU, and for no others.
  virtual std::array<std::byte, 16> uuid() const = 0;
};

// Streams made by CudaDevice are GpuStreams (gpu_stream.h). Over the one named "compute" others
// have precedence, since what they do is short and waited for.

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_CUDA_DEVICE_H_
