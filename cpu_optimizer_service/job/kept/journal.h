// What a job keeps for a later process of the service (kept_job.h), in the order in which that needs
// it. Where the job dies with the process, nothing here stores anything.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_JOURNAL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_JOURNAL_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/core/rank_table.h"
#include "cpu_optimizer_service/job/kept/kept_job.h"

namespace ballast {

class Journal {
 public:
  // A flip of the record stores `ranks` with it, and whether all first weights have come. All
  // outlive the journal.
  Journal(JobCore& core, JobMemory& memory, const RankTable& ranks)
      : core_(core), memory_(memory), ranks_(ranks) {}

  // Null: the job dies with this process. Constant once allocated.
  KeptJob* kept() const { return kept_.get(); }
  bool is_taken_over() const { return kept_ != nullptr && kept_->taken_over(); }
  // What an earlier process left. Before Allocate.
  void TakeOver(std::unique_ptr<KeptJob> kept) { kept_ = std::move(kept); }
  absl::Status Allocate();

  // Stores all that is small, as it is now.
  void Keep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void KeepWord(const StepWord& word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // What has been added to the chunk, all of which is there.
  void KeepContribution(const Contribution& given, uint64_t epoch);
  // The chunk's gradient is changed without a record: until KeepContribution a later process finds
  // nothing of it, and the step is done again.
  void KeepLost(const Contribution& given, uint64_t epoch);

  // Something of the job has changed that makes it used (Job::Use).
  void Touch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { ++changes_; }
  uint64_t changes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return changes_; }

 private:
  void StopKeeping(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore& core_;
  JobMemory& memory_;
  const RankTable& ranks_;
  std::unique_ptr<KeptJob> kept_;
  uint64_t changes_ ABSL_GUARDED_BY(job_lock) = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_KEPT_JOURNAL_H_
