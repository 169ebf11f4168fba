// Saves and closes jobs that nobody uses (--forget-after), so that they free their memory.
#ifndef BALLAST_SERVER_BALLASTD_UNUSED_JOBS_H_
#define BALLAST_SERVER_BALLASTD_UNUSED_JOBS_H_

#include <map>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "cpu_optimizer_service/engine.h"

namespace ballast::server {

// Thread-compatible.
class UnusedJobs {
 public:
  // The engine has a directory of checkpoints, and outlives this.
  UnusedJobs(Engine& engine, absl::Duration after) : engine_(engine), after_(after) {}

  // Call it about every second. `now`: of a clock that never goes back. A job that has had no rank
  // and no change since a call at least `after` before this one is saved and closed; a step that
  // its ranks left undecided is given up, as it is when a rank attaches again. One without weights
  // has nothing to save. One that cannot be saved stays, is logged with the reason, and is tried
  // again later. Blocks while it saves. A rank that comes meanwhile keeps the job.
  void Look(absl::Time now);

 private:
  struct Seen {
    Job::Use use;
    absl::Time since;  // It has been like that.
    absl::Time next;   // Not before.
  };
  void Forget(const std::shared_ptr<Job>& job, Seen& seen, absl::Time now);

  Engine& engine_;
  const absl::Duration after_;
  std::map<std::string, Seen> seen_;  // By uid.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_UNUSED_JOBS_H_
