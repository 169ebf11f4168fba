// A trial of an update by each member, and what all trials say together: whether the update keeps the
// state finite.
//
// Pure: for the same state the result is the same, whichever member has which chunks.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STATE_TRIAL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STATE_TRIAL_H_

#include <optional>
#include <vector>

#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/state_bounds.h"
#include "cpu_optimizer_service/job/step/step_report.h"

namespace ballast {

struct Draft;

// A value that the update would make non-finite.
struct StateOverflow {
  Plane plane = Plane::kMaster;
  float value = 0;
  GradientElement gradient;  // Its gradient.
};

class StateTrial {
 public:
  StateTrial() = default;
  explicit StateTrial(int groups) : largest_(groups, {.planes = {}}) {}

  // The largest magnitudes of some of a group's state.
  void Add(int group, const StateBounds& largest);
  void Add(const JobSpec& spec, const StateOverflow& overflow);
  // Another member's.
  void Add(const JobSpec& spec, const StateTrial& other);

  // The bounds of the draft's unsettled groups become the measured magnitudes, or it becomes a skip.
  void Settle(const JobSpec& spec, Draft& draft) const;

  // Whether it may be a trial of this job.
  bool Fits(const JobSpec& spec) const;

 private:
  template <typename Each>
  friend void Fields(Each&& each, StateTrial& v) {
    each(v.largest_, v.first_);
  }
  std::vector<StateBounds> largest_;    // By group.
  std::optional<StateOverflow> first_;  // By (group, parameter, element).
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STATE_TRIAL_H_
