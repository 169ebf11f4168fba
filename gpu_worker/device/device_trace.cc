#include "gpu_worker/device/device_trace.h"

#include <chrono>
#include <utility>

#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

absl::StatusOr<std::unique_ptr<DeviceTrace>> DeviceTrace::Create(Device& device,
                                                                 Timeline* timeline) {
  std::unique_ptr<DeviceTrace> self(new DeviceTrace(device, timeline));
  if (timeline == nullptr || !timeline->keeps_spans()) return self;
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream,
                           device.CreateStream("trace"));
  // The event comes between the two readings of the host's clock. Of several the closest pair is
  // taken, and its first reading, so that nothing is ever said to have ended later than it did.
  constexpr int kReadings = 8;
  Timeline::Clock::duration closest = Timeline::Clock::duration::max();
  for (int i = 0; i < kReadings; ++i) {
    BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<DeviceEvent> event, device.CreateEvent());
    const Timeline::Clock::time_point before = Timeline::Clock::now();
    BALLAST_RETURN_IF_ERROR(stream->Record(*event));
    BALLAST_RETURN_IF_ERROR(event->Synchronize());
    if (Timeline::Clock::now() - before >= closest) continue;
    closest = Timeline::Clock::now() - before;
    self->zero_ = std::move(event);
    self->zero_time_ = before;
  }
  self->completions_ = std::make_unique<Completions>(device);
  return self;
}

absl::Status DeviceTrace::Around(DeviceStream& stream, Track track, const SpanOf& of,
                                 absl::FunctionRef<absl::Status()> give) {
  if (zero_ == nullptr) {
    const TimelineScope range(timeline_, track, of);  // For a profiler, which knows the device.
    return give();
  }
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceEvent> begin, device_.CreateEvent());
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceEvent> end, device_.CreateEvent());
  BALLAST_RETURN_IF_ERROR(stream.Record(*begin));
  BALLAST_RETURN_IF_ERROR(give());
  BALLAST_RETURN_IF_ERROR(stream.Record(*end));
  completions_->AfterThose([this, track, of, begin, end](const absl::Status&) {
    const auto at = [this](double seconds) {
      return zero_time_ + std::chrono::duration_cast<Timeline::Clock::duration>(
                              std::chrono::duration<double>(seconds));
    };
    // A device that is lost has no times to tell, and says so to others.
    if (!end->Synchronize().ok()) return;
    const absl::StatusOr<double> began = begin->SecondsSince(*zero_);
    const absl::StatusOr<double> ended = end->SecondsSince(*zero_);
    if (began.ok() && ended.ok()) timeline_->Add(track, of, at(*began), at(*ended));
  });
  return absl::OkStatus();
}

}  // namespace ballast::worker
