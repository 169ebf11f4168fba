// device.h on an NVIDIA GPU, with the CUDA runtime.
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
  // GPU `local_rank` of this host, modulo the number of GPUs. FAILED_PRECONDITION, with what to do,
  // if there is no GPU, the driver is missing or too old, or the kernels are not compiled for it;
  // UNAVAILABLE if it is unusable.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Open(int local_rank);

  // The number of usable GPUs: at least one. Errors as in Open.
  static absl::StatusOr<int> Count();

  // Makes it the calling thread's device, for libraries without a stream argument.
  virtual absl::Status MakeCurrent() = 0;
  // Equal for two ranks exactly if they use the same GPU.
  virtual std::array<std::byte, 16> uuid() const = 0;
};

// Streams made by CudaDevice are GpuStreams (gpu_stream.h). Over the one named "compute" others
// have precedence, since what they do is short and waited for.

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_CUDA_DEVICE_H_
