#include "gpu_worker/cuda/gpu_failure.h"

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"

namespace ballast::worker {
namespace {

enum class Kind { kNoMemory, kNotForThisGpu, kRefused, kLost };

// Only what is known to leave the GPU as it was is less than a loss.
Kind KindOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:  // Launches too: kernels are loaded when they are first needed.
      return Kind::kNoMemory;
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return Kind::kNotForThisGpu;
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorInvalidValue:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorNotSupported:
      return Kind::kRefused;
    default:
      return Kind::kLost;
  }
}

}  // namespace

absl::Status GpuFailure::Enter() {
  {
    MutexLock lock(mutex_);
    if (!lost_.ok()) return lost_;
  }
  // Each thread has its own current GPU, and any thread may call. Without the lock, which Check
  // takes.
  return Check(cudaSetDevice(ordinal_), "making it current");
}

absl::Status GpuFailure::Check(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // Or a later call would be blamed for it.
  const std::string failed = absl::StrCat(gpu_, ": ", what, " failed: ", cudaGetErrorString(error),
                                          " (", cudaGetErrorName(error), "); ");
  MutexLock lock(mutex_);
  // After the loss every call fails, and only the first line says something about the cause.
  if (!lost_.ok()) return lost_;
  switch (KindOf(error)) {
    case Kind::kNoMemory:
      return WithReason(
          absl::ResourceExhaustedError(absl::StrCat(
              failed,
              "choose a smaller --batch with more --micro-steps, or end what else uses it")),
          reason::kDeviceMemoryFull);
    case Kind::kNotForThisGpu:
      return absl::FailedPreconditionError(absl::StrCat(
          failed, "build with CMAKE_CUDA_ARCHITECTURES that name this GPU, or use --device=cpu"));
    case Kind::kRefused:
      return absl::InternalError(
          absl::StrCat(failed, "the GPU is well, this is our mistake: please report this line"));
    case Kind::kLost:
      break;
  }
  // Work is done later than it is given, so the call that is named may not be the one to blame.
  lost_ = absl::UnavailableError(
      absl::StrCat(failed,
                   "the cause may be work given before; see nvidia-smi and dmesg, and "
                   "start again"));
  return lost_;
}

}  // namespace ballast::worker
