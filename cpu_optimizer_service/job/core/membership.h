// Which process has which rank, and what that permits.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_MEMBERSHIP_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_MEMBERSHIP_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/rank_table.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast {

class Membership {
 public:
  // `core` outlives it.
  explicit Membership(JobCore& core) : table(core.layout.world_size()), core_(core) {}

  RankTable table ABSL_GUARDED_BY(job_lock);

  // ABORTED, with the reason, if the caller has to attach again or was replaced.
  absl::Status CheckGeneration(const Generation& generation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckCurrent(const StreamKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckHolder(int rank, const std::string& process_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // INVALID_ARGUMENT, NOT_FOUND or FAILED_PRECONDITION: it can never work.
  absl::Status CheckAttachRequest(const AttachRequest& request) const;
  // `committed_step`: the visible one.
  absl::Status CheckMayAttach(const AttachRequest& request, uint64_t committed_step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckMayOpen(const OpenStreamRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // After the section listeners get the reason, then memories are unmapped.
  void Detach(Detached detached, absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The rank's stream, if any, gets the reason of its end.
  void EndStream(int rank, absl::string_view reason, std::string why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The rank's shared bytes.
  int64_t MemoryBytes(int rank) const;

 private:
  JobCore& core_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_MEMBERSHIP_H_
