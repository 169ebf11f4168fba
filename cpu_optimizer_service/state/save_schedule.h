// The schedule of a job's saves: the step and time of the last one, or of the job's begin.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SAVE_SCHEDULE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SAVE_SCHEDULE_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "cpu_optimizer_service/state/checkpoint_directory.h"

namespace ballast {

// Thread-compatible: the job's lock guards it.
class SaveSchedule {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit SaveSchedule(Time now) : at_(now), looked_at_(now) {}

  bool IsDue(const CheckpointPolicy& policy, uint64_t committed_step, Time now) const {
    return policy.IsDue(committed_step, step_, std::chrono::duration<double>(now - at_).count());
  }
  // Whether the save after the next step is due, if that step takes as long as the one committed
  // now. Ask once at each commit.
  bool IsDueNext(const CheckpointPolicy& policy, uint64_t committed_step, Time now) {
    const Time::duration of_step = now - std::exchange(looked_at_, now);
    return IsDue(policy, committed_step + 1, now + of_step);
  }
  // The state of `step` was saved or loaded.
  void SavedAt(uint64_t step, Time now) {
    step_ = step;
    at_ = now;
  }
  // First weights have arrived, with the state of `step`.
  void BeginAt(uint64_t step) { step_ = step; }
  // The job has gone back to `step`.
  void GoBackTo(uint64_t step) { step_ = std::min(step_, step); }

 private:
  uint64_t step_ = 0;
  Time at_;
  Time looked_at_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SAVE_SCHEDULE_H_
