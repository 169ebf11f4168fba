// Gradients between backward and the optimizer.
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_GRADIENT_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_GRADIENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker::cuda {

// to[i] = from[i] rounded to `dtype` by the rule of float_format.h.
absl::Status RoundGradient(DeviceStream& stream, int64_t elements, const float* from, DType dtype,
                           std::byte* to);

// *first = min(*first, offset + the index of the first element that is not finite once rounded to
// `dtype`); unchanged if all are finite. `first` is on the device and starts as kNoneNonFinite.
inline constexpr uint64_t kNoneNonFinite = ~uint64_t{0};
absl::Status FindNonFinite(DeviceStream& stream, int64_t elements, const float* gradient,
                           DType dtype, uint64_t offset, uint64_t* first);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_GRADIENT_H_
