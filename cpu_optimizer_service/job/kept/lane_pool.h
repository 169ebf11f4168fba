// Lanes that record changes in place (kernels/redo_lane.h): of a job's updates, or of its sums. They
// lie in memory that outlives the process. A lane whose word is not 0 is in use.
//
// Thread-safe.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_LANE_POOL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_LANE_POOL_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"

namespace ballast {

class LanePool {
 public:
  // What Stored is told.
  LanePool(const char* taken, const char* freed) : taken_(taken), freed_(freed) {}

  // Once. The lanes outlive the pool; those in use were left so by an earlier process.
  void Use(absl::Span<RedoLane> lanes);

  // A lane for a change of the chunk: the one that an earlier process left of the same change, with
  // the word that it has, or one that is free. Its word and tag are stored.
  // If none is free: null, or waits; then no thread may wait for another one while it has a lane.
  RedoLane* Take(int chunk, uint64_t tag, bool may_wait);
  // All that the lane recorded is in place.
  void Give(RedoLane* lane);

  // Those that an earlier process left in use, and that were neither taken nor freed since.
  bool HasLeft(int chunk, uint64_t tag) const;
  bool AllLeft(absl::FunctionRef<bool(const RedoLane&)> is_so) const;
  // Frees all others of them.
  void KeepLeft(absl::FunctionRef<bool(const RedoLane&)> is_wanted);
  void FreeLeft() {
    KeepLeft([](const RedoLane&) { return false; });
  }

 private:
  const char* const taken_;
  const char* const freed_;
  mutable Mutex mutex_;
  CondVar lane_free_;
  std::vector<RedoLane*> free_ ABSL_GUARDED_BY(mutex_);
  std::vector<RedoLane*> left_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_LANE_POOL_H_
