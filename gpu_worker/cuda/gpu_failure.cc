#include "gpu_worker/cuda/gpu_failure.h"

#include "absl/strings/str_cat.h"

namespace ballast::worker {

absl::Status GpuFailure::Enter() {
  {
    MutexLock lock(mutex_);
    if (!failed_.ok()) return failed_;
  }
  return Check(cudaSetDevice(ordinal_), "making it current");
}

absl::Status GpuFailure::Check(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // Or a later call would be blamed for it.
  MutexLock lock(mutex_);
  if (failed_.ok()) {
    failed_ = absl::UnavailableError(
        absl::StrCat(gpu_, ": ", what, " failed: ", cudaGetErrorString(error), " (",
                     cudaGetErrorName(error), "); see nvidia-smi and dmesg, and start again"));
  }
  return failed_;
}

}  // namespace ballast::worker
