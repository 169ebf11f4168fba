#include "gpu_worker/pipeline/device_trace.h"

#include <utility>

#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

absl::StatusOr<std::unique_ptr<DeviceTrace>> DeviceTrace::Create(Device& device, Timeline* timeline,
                                                                 HostClock now) {
  std::unique_ptr<DeviceTrace> self(new DeviceTrace(device, timeline));
  if (timeline == nullptr || !timeline->keeps_spans()) return self;
  BALLAST_ASSIGN_OR_RETURN(self->clock_, DeviceClock::Create(device, std::move(now)));
  self->completions_ = std::make_unique<Completions>(device);
  return self;
}

absl::StatusOr<std::shared_ptr<DeviceTrace::Ends>> DeviceTrace::TakeEnds() {
  std::unique_ptr<Ends> ends;
  {
    MutexLock lock(mutex_);
    if (!pool_.empty()) {
      ends = std::move(pool_.back());
      pool_.pop_back();
    }
  }
  if (ends == nullptr) {
    ends = std::make_unique<Ends>();
    BALLAST_ASSIGN_OR_RETURN(ends->begin, device_.CreateEvent());
    BALLAST_ASSIGN_OR_RETURN(ends->end, device_.CreateEvent());
  }
  // A std::function is copied, so the pair is shared. When its last copy is gone, the pair can be
  // recorded again.
  return std::shared_ptr<Ends>(ends.release(), [this](Ends* used) {
    MutexLock lock(mutex_);
    pool_.emplace_back(used);
  });
}

absl::Status DeviceTrace::Around(DeviceStream& stream, Track track, const SpanOf& of,
                                 absl::FunctionRef<absl::Status()> give) {
  if (clock_ == nullptr) {
    const TimelineScope range(timeline_, track, of);  // For a profiler, which times devices itself.
    return give();
  }
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Ends> ends, TakeEnds());
  BALLAST_RETURN_IF_ERROR(stream.Record(*ends->begin));
  BALLAST_RETURN_IF_ERROR(give());
  BALLAST_RETURN_IF_ERROR(stream.Record(*ends->end));
  // AfterThose and not After: the span's own end is the event to wait for, and After would record
  // another. All spans are read in the order in which they were given; a long one delays the
  // reading of later ones, but no stream.
  completions_->AfterThose([this, track, of, ends](const absl::Status&) {
    // A device that is lost returns no times; other calls report that.
    if (!ends->end->Synchronize().ok()) return;
    const absl::StatusOr<DeviceClock::Times> times = clock_->Between(*ends->begin, *ends->end);
    if (times.ok()) timeline_->Add(track, of, times->begin, times->end);
  });
  return absl::OkStatus();
}

}  // namespace ballast::worker
