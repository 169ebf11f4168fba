// The device of kernel tests on any machine: kernels run on the CPU.
#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {

absl::StatusOr<std::unique_ptr<Device>> MakeTestDevice() { return std::make_unique<FakeDevice>(); }

}  // namespace ballast::worker::cuda
