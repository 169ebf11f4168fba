// A checkpoint's index as the small state of a job that resumes from it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_INDEX_RECORD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_INDEX_RECORD_H_

#include "absl/types/span.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/state/saver.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

// A step of a job with these groups, in this job's order of groups.
StepRecord WithGroups(const StepRecord& of, absl::Span<const CheckpointIndex::Group> groups,
                      const JobCore& core);
// Takes all small state of the parameters and groups that this job has, too.
void TakeRecord(const CheckpointIndex& index, JobCore& core, ChunkStore& store, Saver& saver)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_INDEX_RECORD_H_
