// Who a job is, and its small state: plain values, with all that a restart would need besides
// chunks and gradients.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_RECORD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_RECORD_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_record.h"

namespace ballast {

// Given to a job when it is made.
struct JobIdentity {
  std::string uid;
  uint64_t generation = 1;
  JobSpec spec;
};

// A uid that no other job has: 128 random bits in hex.
std::string MakeJobUid();

// What has been decided so far.
struct StepHistory {
  std::deque<StepRecord> recent_steps;  // Oldest first, at most kRecentSteps.
  uint64_t applied_steps = 0;
  uint64_t skipped_steps = 0;
  // Decided steps of which the ledger held every micro-step of every chunk: all, or a bug.
  uint64_t coverage_complete_steps = 0;
  SpeculationCounts speculation;

  // Counts the step and remembers its record, with at most kRecordedNames names.
  void Add(StepRecord record, bool coverage_complete);
  // Of steps that the state has not seen: forgets the records, keeps the counts. `last` may be
  // null.
  void Replace(const StepRecord* last);
};

struct JobRecord {
  uint64_t generation = 1;
  uint64_t committed_step = 0;
  std::vector<HyperParameters> hyper_parameters;  // One per group, in force.
  std::vector<int64_t> update_counts;             // By parameter; 0 for a frozen one.
  std::string trainer_state;                      // As the last committed step's begin gave it.
  StepHistory history;
  std::string resumed_uid;  // Of the job whose checkpoint was loaded last; empty: none.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_RECORD_H_
