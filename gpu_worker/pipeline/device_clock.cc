#include "gpu_worker/pipeline/device_clock.h"

#include <chrono>
#include <utility>

#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

using Duration = Timeline::Clock::duration;
using Seconds = std::chrono::duration<double>;

// What crystals of usual quality differ by, some tens of microseconds a second, is as much as one
// reading may be wrong by.
constexpr Duration kReadAgainAfter = std::chrono::seconds(1);
// The most that clocks drift apart in a second: the kernel's maximal slew.
constexpr double kMostDrift = 500e-6;
constexpr int kReadings = 8;

// In either order: what a device returns for events in the wrong order is not specified.
absl::StatusOr<Duration> FromTo(const DeviceEvent& from, const DeviceEvent& to) {
  BALLAST_ASSIGN_OR_RETURN(double seconds, to.SecondsSince(from));
  if (seconds <= 0) {
    BALLAST_ASSIGN_OR_RETURN(const double before, from.SecondsSince(to));
    seconds = -before;
  }
  return std::chrono::duration_cast<Duration>(Seconds(seconds));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceClock>> DeviceClock::Create(Device& device, HostClock now) {
  std::unique_ptr<DeviceClock> self(new DeviceClock(device, std::move(now)));
  BALLAST_ASSIGN_OR_RETURN(self->stream_, device.CreateStream("trace"));
  BALLAST_ASSIGN_OR_RETURN(self->zero_, self->Read());
  self->last_read_ = self->now_();
  return self;
}

absl::StatusOr<DeviceClock::Times> DeviceClock::Between(const DeviceEvent& begin,
                                                        const DeviceEvent& end) {
  if (now_() - last_read_ >= kReadAgainAfter) {
    // If the device cannot be read now, the older reading stays; other calls report that the device
    // is lost.
    (void)Renew();
    // Also after a failure: else each span would try again.
    last_read_ = now_();
  }
  // After a new reading the zero may be later than the span. Both times are negative then.
  BALLAST_ASSIGN_OR_RETURN(const Duration began, FromTo(*zero_.event, begin));
  BALLAST_ASSIGN_OR_RETURN(const Duration ended, FromTo(*zero_.event, end));
  return Times{.begin = zero_.time + began, .end = zero_.time + ended};
}

// The event is between the two readings of the host's clock. The closest of several pairs is taken,
// and its first reading, so that no reported end is later than the real one.
absl::StatusOr<DeviceClock::Zero> DeviceClock::Read() {
  Zero closest;
  for (int i = 0; i < kReadings; ++i) {
    BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<DeviceEvent> event, device_.CreateEvent());
    const Timeline::Clock::time_point before = now_();
    BALLAST_RETURN_IF_ERROR(stream_->Record(*event));
    BALLAST_RETURN_IF_ERROR(event->Synchronize());
    const Duration wrong_by = now_() - before;
    if (wrong_by < closest.wrong_by) closest = {std::move(event), before, wrong_by};
  }
  return closest;
}

// On a device that has much to do all readings may be slow. Then the older zero is the better one,
// until the clocks may have gone apart further than that.
absl::Status DeviceClock::Renew() {
  BALLAST_ASSIGN_OR_RETURN(Zero read, Read());
  const Seconds drift = kMostDrift * Seconds(read.time - zero_.time);
  if (read.wrong_by <= zero_.wrong_by + drift) zero_ = std::move(read);
  return absl::OkStatus();
}

}  // namespace ballast::worker
