// A stream of CudaDevice for code that gives it work by CUDA's own calls: kernels (launch.cuh) and
// libraries.
//
//   auto& gpu = static_cast<GpuStream&>(stream);
//   BALLAST_ASSIGN_OR_RETURN(const cudaStream_t native, gpu.Enter());
//   return gpu.Check(cudaFrobnicateAsync(memory, native), "frobnicate");
#ifndef BALLAST_GPU_WORKER_CUDA_GPU_STREAM_H_
#define BALLAST_GPU_WORKER_CUDA_GPU_STREAM_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

// Kernels and libraries in gpu_worker/cuda get only this kind of DeviceStream.
class GpuStream : public DeviceStream {
 public:
  // Makes the stream's GPU the calling thread's. Returns the GPU's failure, if any: then give it no
  // more work.
  virtual absl::StatusOr<cudaStream_t> Enter() = 0;
  // The status of a call that gave work to the stream: GpuFailure::Check, with the stream's name.
  virtual absl::Status Check(cudaError_t error, absl::string_view what) = 0;
  // The GPU's failure, if any, reported as that of `what`: for libraries, which only report for a
  // lost GPU that they failed. Does not wait.
  virtual absl::Status CheckGpu(absl::string_view what) = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_GPU_STREAM_H_
