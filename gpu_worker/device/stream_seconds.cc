#include "gpu_worker/device/stream_seconds.h"

#include <utility>

#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

absl::Status StreamSeconds::Begin(DeviceStream& stream) {
  Check(!begun_, "a pair of points ends before the next begins");
  // Pairs below `used_` are still to be read by Take; those from it on are free.
  if (used_ == pairs_.size()) {
    Pair pair;
    BALLAST_ASSIGN_OR_RETURN(pair.begin, device_.CreateEvent());
    BALLAST_ASSIGN_OR_RETURN(pair.end, device_.CreateEvent());
    pairs_.push_back(std::move(pair));
  }
  begun_ = true;
  return stream.Record(*pairs_[used_].begin);
}

absl::Status StreamSeconds::End(DeviceStream& stream) {
  Check(begun_, "a pair of points begins before it ends");
  begun_ = false;
  return stream.Record(*pairs_[used_++].end);
}

absl::Status StreamSeconds::Around(DeviceStream& stream, absl::FunctionRef<absl::Status()> give) {
  absl::Status status = Begin(stream);
  if (status.ok()) status = give();
  if (status.ok()) status = End(stream);
  // A pair that has no end would make the next Begin abort.
  if (!status.ok()) Clear();
  return status;
}

void StreamSeconds::Clear() {
  begun_ = false;
  used_ = 0;
}

absl::StatusOr<double> StreamSeconds::Take() {
  Check(!begun_, "a pair of points ends before it is read");
  double seconds = 0;
  for (size_t i = 0; i < used_; ++i) {
    BALLAST_ASSIGN_OR_RETURN(const double of_pair, pairs_[i].end->SecondsSince(*pairs_[i].begin));
    seconds += of_pair;
  }
  used_ = 0;
  return seconds;
}

}  // namespace ballast::worker
