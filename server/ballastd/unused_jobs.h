// Saves and closes unused jobs (--forget-after) to free their memory.
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

  // Call it about every second. `now` comes from a clock that never goes back. A job without a rank
  // and without a change for `after` is saved and closed. If its ranks left a step undecided, the
  // step is given up, as when a rank attaches again. A job without weights needs no save. If a save
  // fails, the job stays; the reason is logged, and the save is retried later. Blocks during a
  // save. A rank that comes meanwhile keeps the job.
  void Look(absl::Time now);

 private:
  struct Seen {
    Job::Use use;
    absl::Time since;  // Unused since.
    absl::Time next;   // The next attempt's earliest time.
  };
  void Forget(const std::shared_ptr<Job>& job, Seen& seen, absl::Time now);

  Engine& engine_;
  const absl::Duration after_;
  std::map<std::string, Seen> seen_;  // By uid.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_UNUSED_JOBS_H_
