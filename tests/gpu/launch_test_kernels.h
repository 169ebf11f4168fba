// Launches of gpu_worker/cuda/launch.cuh that work and that fail.
#ifndef BALLAST_TESTS_GPU_LAUNCH_TEST_KERNELS_H_
#define BALLAST_TESTS_GPU_LAUNCH_TEST_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker::cuda {

// *to = 7, by one thread of a block of `threads` with so much dynamic shared memory. Null: an
// assertion fails on the GPU, which loses it as a bad address would, for this process only.
absl::Status StoreSeven(DeviceStream& stream, uint32_t* to, unsigned threads = 1,
                        size_t shared_bytes = 0);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_LAUNCH_TEST_KERNELS_H_
