// Converts the device's clock to the host's: when a stream did the work between two events, in time
// points of the timeline.
//
// A device returns only the time between two events, in milliseconds as a float: over a minute
// accurate to microseconds, over hours only to half a millisecond. Also, two clocks drift apart. So
// both are read together again and again, on the clock's own stream, without a wait of other
// streams.
//
// Used by one thread at a time.
#ifndef BALLAST_GPU_WORKER_PIPELINE_DEVICE_CLOCK_H_
#define BALLAST_GPU_WORKER_PIPELINE_DEVICE_CLOCK_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

// The host's clock; tests have their own.
using HostClock = std::function<Timeline::Clock::time_point()>;

class DeviceClock {
 public:
  // Waits for the device. Borrows it.
  static absl::StatusOr<std::unique_ptr<DeviceClock>> Create(Device& device, HostClock now);

  struct Times {
    Timeline::Clock::time_point begin;
    Timeline::Clock::time_point end;
  };
  // For two events that are done. May wait for the device to read the clocks; if that fails, the
  // last reading is used.
  absl::StatusOr<Times> Between(const DeviceEvent& begin, const DeviceEvent& end);

 private:
  // One moment on both clocks.
  struct Zero {
    std::unique_ptr<DeviceEvent> event;
    Timeline::Clock::time_point time;  // On the host, and not after it.
    // It may be early by so much.
    Timeline::Clock::duration wrong_by = Timeline::Clock::duration::max();
  };

  DeviceClock(Device& device, HostClock now) : device_(device), now_(std::move(now)) {}

  absl::StatusOr<Zero> Read();
  absl::Status Renew();

  Device& device_;
  const HostClock now_;
  std::unique_ptr<DeviceStream> stream_;
  Zero zero_;
  Timeline::Clock::time_point last_read_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_CLOCK_H_
