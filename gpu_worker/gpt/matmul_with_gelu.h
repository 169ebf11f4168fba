// Matrix products whose library may refuse gelu in one go with the product, as cuBLASLt may for an
// m or k of 1: those are a plain product in fp32 and a kernel, with the same roundings.
#ifndef BALLAST_GPU_WORKER_GPT_MATMUL_WITH_GELU_H_
#define BALLAST_GPU_WORKER_GPT_MATMUL_WITH_GELU_H_

#include <memory>

#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker {

// `device` is borrowed. A product that `matmul` refuses without gelu, too, is its first error. What
// was refused is not asked for again. RESOURCE_EXHAUSTED if the fp32 product has no memory.
std::unique_ptr<DeviceMatmul> MakeMatmulWithGelu(Device& device,
                                                 std::unique_ptr<DeviceMatmul> matmul);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_GPT_MATMUL_WITH_GELU_H_
