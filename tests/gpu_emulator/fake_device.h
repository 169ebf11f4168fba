// A device that runs on the CPU, for tests of everything that drives one. Its memory is the heap's,
// so that sanitizers see each read and write, and filled with NaN before it is freed; under
// AddressSanitizer the host may touch none of it.
//
// Work that streams were given is done by a thread of the device's own, in an order that the seed
// chooses among those that streams and events allow, and late: what no host call waits for yet may
// wait for ever, or be done at once (with a probability that seed % 4 chooses: 0 never, 3 always).
// Host memory is really read or written when the copy is done, so that a buffer reused too early
// shows as wrong values; the same for device memory. Waiting for an event or a stream makes the
// device do the work, and so does asking an event again and again; freeing device memory waits for
// everything; destroying a stream or an event waits for nothing.
//
// Time between events is returned as CUDA returns it, as milliseconds in a float; for two in the
// wrong order, where CUDA specifies nothing, as zero.
//
// It aborts with a message where the rules of device.h are broken: two threads in one stream,
// copies beyond memory of the device, pinned memory that ends while a copy still needs it.
#ifndef BALLAST_TESTS_GPU_EMULATOR_FAKE_DEVICE_H_
#define BALLAST_TESTS_GPU_EMULATOR_FAKE_DEVICE_H_

#include <chrono>
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
  // The clock of events; null: the host's steady clock. Called by the device's thread.
  std::function<std::chrono::nanoseconds()> clock;
  // Asked before each operation ("allocate", "allocate host", "pin", "create stream", "create
  // event", "record", "wait", "copy to host", "copy to device", "copy on device", "zero", "kernel",
  // "synchronize", "query"), with the stream, the kernel, or what the memory is for. The operation
  // returns the error; UNAVAILABLE loses the device: all later operations return it too, and work
  // that has not begun never does. Called from any thread.
  std::function<absl::Status(absl::string_view operation, absl::string_view what)> fail;
};

class FakeDevice final : public Device {
 public:
  explicit FakeDevice(FakeDeviceOptions options = {});
  ~FakeDevice() override;  // Aborts if memory or streams are left: they leak.

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

#endif  // BALLAST_TESTS_GPU_EMULATOR_FAKE_DEVICE_H_
