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
  BALLAST_ASSIGN_OR_RETURN(self->zero_, device.CreateEvent());
  BALLAST_RETURN_IF_ERROR(stream->Record(*self->zero_));
  BALLAST_RETURN_IF_ERROR(self->zero_->Synchronize());
  self->zero_time_ = Timeline::Clock::now();
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
    const auto at = [this](const DeviceEvent& event) {
      const std::chrono::duration<double> since(event.SecondsSince(*zero_).value_or(0));
      return zero_time_ + std::chrono::duration_cast<Timeline::Clock::duration>(since);
    };
    // A device that is lost has no times to tell, and says so to others.
    if (end->Synchronize().ok()) timeline_->Add(track, of, at(*begin), at(*end));
  });
  return absl::OkStatus();
}

}  // namespace ballast::worker
