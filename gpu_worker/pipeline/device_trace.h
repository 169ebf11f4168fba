// The times of a device's streams, for a timeline on the host's clock: events around work, read
// once they are done. Without a timeline it records nothing, at no cost. For a timeline without
// spans the giving thread has ranges for a profiler.
//
// Thread-safe, but each stream keeps its own rule.
#ifndef BALLAST_GPU_WORKER_PIPELINE_DEVICE_TRACE_H_
#define BALLAST_GPU_WORKER_PIPELINE_DEVICE_TRACE_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/pipeline/completions.h"
#include "gpu_worker/pipeline/device_clock.h"

namespace ballast::worker {

class DeviceTrace {
 public:
  // `timeline` is nullable. If it keeps spans, waits once for the device, to compare its clock with
  // the host's. Borrows both until destruction, which waits for outstanding reads.
  static absl::StatusOr<std::unique_ptr<DeviceTrace>> Create(Device& device, Timeline* timeline,
                                                             HostClock now = Timeline::Clock::now);

  Timeline* timeline() const { return timeline_; }

  // Calls `give`, and records the time from the end of the work before it to the end of its own.
  // Errors are those of `give` and of the device.
  absl::Status Around(DeviceStream& stream, Track track, const SpanOf& of,
                      absl::FunctionRef<absl::Status()> give);

 private:
  struct Ends {
    std::unique_ptr<DeviceEvent> begin;
    std::unique_ptr<DeviceEvent> end;
  };

  DeviceTrace(Device& device, Timeline* timeline) : device_(device), timeline_(timeline) {}

  // They return to the pool with the last reference.
  absl::StatusOr<std::shared_ptr<Ends>> TakeEnds();

  Device& device_;
  Timeline* const timeline_;
  // Null: nothing is recorded. Used by the completions' thread.
  std::unique_ptr<DeviceClock> clock_;
  Mutex mutex_;
  // As many as the maximal number of unread spans.
  std::vector<std::unique_ptr<Ends>> pool_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Completions> completions_;  // Last: its calls use all of the above.
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_TRACE_H_
