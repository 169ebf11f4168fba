// The matrix products of the device that tests run on (../cuda/kernel_test.h): linked once with the
// tests' own, and once with a GPU's.
#ifndef BALLAST_TESTS_GPU_WORKER_GPT_TEST_MATMUL_H_
#define BALLAST_TESTS_GPU_WORKER_GPT_TEST_MATMUL_H_

#include <memory>

#include "absl/status/statusor.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

// `device` is one that MakeTestDevice made; borrowed until destruction.
absl::StatusOr<std::unique_ptr<DeviceMatmul>> MakeTestMatmul(Device& device);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_WORKER_GPT_TEST_MATMUL_H_
