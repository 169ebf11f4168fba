// The tests of tests/gpu_worker on a GPU: the device and the matrix products that they ask for.
#include <utility>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/cublaslt_matmul.h"
#include "gpu_worker/cuda/cuda_device.h"
#include "gpu_worker/gpt/matmul_with_gelu.h"
#include "tests/gpu_worker/cuda/kernel_test.h"
#include "tests/gpu_worker/gpt/test_matmul.h"

namespace ballast::worker::cuda {

absl::StatusOr<std::unique_ptr<Device>> MakeTestDevice() {
  absl::StatusOr<std::unique_ptr<CudaDevice>> device = CudaDevice::Open(0);
  if (absl::IsFailedPrecondition(device.status())) {
    return absl::NotFoundError(device.status().message());
  }
  return device;
}

absl::StatusOr<std::unique_ptr<DeviceMatmul>> MakeTestMatmul(Device& device) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMatmul> matmul,
                           MakeCublasLtMatmul(static_cast<CudaDevice&>(device)));
  return MakeMatmulWithGelu(device, std::move(matmul));
}

}  // namespace ballast::worker::cuda
