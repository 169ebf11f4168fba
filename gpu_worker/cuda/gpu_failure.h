// A GPU's errors as statuses; a lost GPU stays lost.
#ifndef BALLAST_GPU_WORKER_CUDA_GPU_FAILURE_H_
#define BALLAST_GPU_WORKER_CUDA_GPU_FAILURE_H_

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::worker {

// Thread-safe.
class GpuFailure {
 public:
  GpuFailure(int ordinal, std::string gpu) : ordinal_(ordinal), gpu_(std::move(gpu)) {}

  // Makes the GPU the calling thread's for the next call. Returns the failure that lost the GPU, if
  // any.
  absl::Status Enter();

  // The status of a call, which `what` describes: "stream copies: copy to host". One line that
  // names the GPU and the remedy:
  //   RESOURCE_EXHAUSTED   the call wanted memory that the GPU does not have
  //   FAILED_PRECONDITION  a kernel is not compiled for this GPU
  //   INTERNAL             the call was refused: its arguments are wrong
  //   UNAVAILABLE          anything else, unknown errors too: the GPU is lost, and
  //                        every later call gets the line of the first that noticed
  // After the first three the GPU goes on as if the call had not been made.
  absl::Status Check(cudaError_t error, absl::string_view what);

  const std::string& gpu() const { return gpu_; }

 private:
  const int ordinal_;
  const std::string gpu_;
  Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_GPU_FAILURE_H_
