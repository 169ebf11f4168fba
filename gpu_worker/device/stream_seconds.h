// How long a stream spent between pairs of points in what it is given, by the device's clock.
//
//   seconds.Begin(stream);
//   ... work, or a wait, is given to the stream ...
//   seconds.End(stream);
//   ...                       // the stream has done it all
//   seconds.Take()            // since the last Take
//
// Costs two events a pair, which are used again, and no waiting.
//
// Threads: one at a time.
#ifndef BALLAST_GPU_WORKER_DEVICE_STREAM_SECONDS_H_
#define BALLAST_GPU_WORKER_DEVICE_STREAM_SECONDS_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

class StreamSeconds {
 public:
  explicit StreamSeconds(Device& device) : device_(device) {}

  // Pairs do not overlap.
  absl::Status Begin(DeviceStream& stream);
  absl::Status End(DeviceStream& stream);
  // Both around `give`. After an error, of `give` or the device, drops all pairs.
  absl::Status Around(DeviceStream& stream, absl::FunctionRef<absl::Status()> give);
  // Whether a pair has begun and not ended.
  bool begun() const { return begun_; }
  // Drops the pairs since the last Take, and a pair that has only begun.
  void Clear();

  // Precondition: no pair has only begun, and the streams are past all ends.
  absl::StatusOr<double> Take();

 private:
  struct Pair {
    std::unique_ptr<DeviceEvent> begin;
    std::unique_ptr<DeviceEvent> end;
  };

  Device& device_;
  std::vector<Pair> pairs_;  // Those of before, too, to be used again.
  size_t used_ = 0;
  bool begun_ = false;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_STREAM_SECONDS_H_
