// A device that runs on the CPU, for tests of everything that drives one. Its memory is the heap's,
// so that sanitizers see each read and write, and poisoned with NaN where Device::Allocate does not
// promise zeros any more: after a copy's source was given back, say.
//
// Work that streams were given is done by a thread of the device's own, in an order that the seed
// chooses among those that streams and events allow, and late: what no host call waits for yet may
// wait long. Host memory that a copy has not read is really read when the copy is done, so that a
// buffer reused too early shows as wrong values; the same for device memory.
#ifndef BALLAST_TESTS_GPU_WORKER_FAKE_DEVICE_H_
#define BALLAST_TESTS_GPU_WORKER_FAKE_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker {

struct FakeDeviceOptions {
  uint64_t seed = 0;
  int64_t memory_bytes = int64_t{1} << 32;
  bool can_pin = true;
  // Asked before each operation ("allocate", "pin", "create stream", "create event", "record",
  // "wait", "copy to host", "copy to device", "copy on device", "zero", "kernel", "synchronize"),
  // with the stream or what the memory is for. An error is what the operation says; UNAVAILABLE
  // loses the device: all later operations say it too, and work not done yet never is. Called from
  // any thread.
  std::function<absl::Status(absl::string_view operation, absl::string_view what)> fail;
};

class FakeDevice final : public Device {
 public:
  explicit FakeDevice(FakeDeviceOptions options = {});
  ~FakeDevice() override;  // Aborts if memory or streams are left: somebody leaked them.

  const std::string& name() const override;
  int compute_capability() const override { return 90; }
  int64_t memory_bytes() const override;
  int64_t allocated_bytes() const override;
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(size_t size_bytes,
                                                         absl::string_view what) override;
  absl::StatusOr<std::unique_ptr<HostMemory>> AllocateHost(size_t size_bytes,
                                                           absl::string_view what) override;
  absl::StatusOr<std::unique_ptr<HostMemory>> PinHost(absl::Span<std::byte> bytes,
                                                      absl::string_view what) override;
  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream(absl::string_view name) override;
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override;

  int64_t most_allocated_bytes() const;  // Since the beginning.

  class Impl;

 private:
  const std::shared_ptr<Impl> impl_;
};

// Gives a stream of a FakeDevice work of any kind; `what` is "kernel" to `fail`, named `name`. The
// work runs on the device's thread, alone.
absl::Status GiveToFakeStream(DeviceStream& stream, absl::string_view name,
                              std::function<void()> work);

// Matrix products in fp32, rounded once at the end, on a FakeDevice.
std::unique_ptr<DeviceMatmul> MakeFakeMatmul();

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_FAKE_DEVICE_H_
