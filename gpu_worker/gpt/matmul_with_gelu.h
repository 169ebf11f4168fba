// Matrix products for libraries that may refuse gelu combined with the product, as cuBLASLt may for
// an m or k of 1. Then it makes a plain product in fp32 and calls a kernel, with the same
// roundings.
#ifndef BALLAST_GPU_WORKER_GPT_MATMUL_WITH_GELU_H_
#define BALLAST_GPU_WORKER_GPT_MATMUL_WITH_GELU_H_

#include <memory>

#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker {

// `device` is borrowed. If `matmul` refuses a product without gelu, too, returns its first error. A
// refused product is not tried again. RESOURCE_EXHAUSTED if the fp32 product has no memory.
std::unique_ptr<DeviceMatmul> MakeMatmulWithGelu(Device& device,
                                                 std::unique_ptr<DeviceMatmul> matmul);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_GPT_MATMUL_WITH_GELU_H_
