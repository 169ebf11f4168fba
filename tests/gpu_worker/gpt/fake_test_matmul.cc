#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/gpt/test_matmul.h"

namespace ballast::worker::cuda {

absl::StatusOr<std::unique_ptr<DeviceMatmul>> MakeTestMatmul(Device&) { return MakeFakeMatmul(); }

}  // namespace ballast::worker::cuda
