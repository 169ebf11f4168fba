// matmul.h with cuBLASLt.
#ifndef BALLAST_GPU_WORKER_CUDA_CUBLASLT_MATMUL_H_
#define BALLAST_GPU_WORKER_CUDA_CUBLASLT_MATMUL_H_

#include <memory>

#include "absl/status/statusor.h"
#include "gpu_worker/cuda/cuda_device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker {

// `device` is borrowed until destruction. FAILED_PRECONDITION if the library is missing;
// RESOURCE_EXHAUSTED if there is no memory for its workspace.
absl::StatusOr<std::unique_ptr<DeviceMatmul>> MakeCublasLtMatmul(CudaDevice& device);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CUDA_CUBLASLT_MATMUL_H_
