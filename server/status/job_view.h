// What metrics and page both show of a job's status.
#ifndef BALLAST_SERVER_STATUS_JOB_VIEW_H_
#define BALLAST_SERVER_STATUS_JOB_VIEW_H_

#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "cpu_optimizer_service/job/job.h"
#include "cpu_optimizer_service/job/job_status.h"
#include "server/access/access.h"

namespace ballast::server {

// Who looks; nullopt: every peer may look at everything.
using Viewer = std::optional<Caller>;
inline bool MaySee(const Viewer& viewer, const Job& job) {
  return !viewer.has_value() || viewer->MayUse(job.spec().name);
}

inline constexpr std::array kJobPhases = {
    JobPhase::kAwaitingWeights, JobPhase::kReady,    JobPhase::kOpen,   JobPhase::kSealed,
    JobPhase::kVoting,          JobPhase::kUpdating, JobPhase::kBroken, JobPhase::kClosed};

inline const char* NameOf(JobPhase phase) {
  switch (phase) {
    case JobPhase::kAwaitingWeights:
      return "awaiting_weights";
    case JobPhase::kReady:
      return "ready";
    case JobPhase::kOpen:
      return "open";
    case JobPhase::kSealed:
      return "sealed";
    case JobPhase::kVoting:
      return "voting";
    case JobPhase::kUpdating:
      return "updating";
    case JobPhase::kBroken:
      return "broken";
    case JobPhase::kClosed:
      return "closed";
  }
  return "unknown";
}

// The ranks that have not sealed the open step, once another one has, or have not voted on it; none
// otherwise.
inline std::vector<int> AwaitedRanks(const JobStatus& status) {
  std::vector<int> ranks;
  if (!status.seconds_since_first_seal.has_value()) return ranks;
  for (size_t rank = 0; rank < status.ranks.size(); ++rank) {
    const RankProgress& progress = status.ranks[rank];
    const bool votes = status.phase == JobPhase::kVoting;
    if (votes ? !progress.voted : !progress.sealed) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_JOB_VIEW_H_
