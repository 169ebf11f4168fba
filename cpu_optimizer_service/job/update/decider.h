// A sealed step's decision: the norm, the draft of an update, and whether it keeps the state finite
// (P10).
//
// Bounds of the state are followed from step to step. If they do not show that an update keeps the
// state finite, the update is tried without a trace.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_DECIDER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_DECIDER_H_

#include <string>

#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "cpu_optimizer_service/job/step/step_machine.h"
#include "cpu_optimizer_service/job/update/executor.h"

namespace ballast {

class Decider {
 public:
  // All outlive it.
  Decider(const JobCore& core, const JobMemory& memory, const Executor& executor,
          const StepMachine& machine)
      : core_(core), memory_(memory), executor_(executor), machine_(machine) {}

  // Of the sealed step with known sums.
  StepNorm Norm() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  Draft MakeDraft() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Computes the update of the unsettled groups. Then the draft is settled; it may be a skip. On an
  // engine's thread, while the gate says that the step is being decided.
  void Try(Draft& draft) const;

 private:
  StepFacts Facts(const std::string& non_finite) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Names the first non-finite element of a sealed step's gradient; empty: all are finite.
  std::string FirstNonFinite() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  std::string DescribeOverflow(const Draft& draft, const ChunkPiece& piece,
                               const TrialUpdate::NonFinite& found) const;

  const JobCore& core_;
  const JobMemory& memory_;
  const Executor& executor_;
  const StepMachine& machine_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_DECIDER_H_
