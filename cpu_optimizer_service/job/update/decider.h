// What a member contributes to the decision of a sealed step: its report, and trials of the update.
// The lead makes the draft from all reports.
//
// Bounds of the state are followed from step to step. If they do not show that an update keeps the
// state finite (P10), the update is tried without a trace.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_DECIDER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_DECIDER_H_

#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/gradients/part_sums.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/step/state_trial.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "cpu_optimizer_service/job/step/step_lead.h"
#include "cpu_optimizer_service/job/step/step_machine.h"
#include "cpu_optimizer_service/job/step/step_report.h"
#include "cpu_optimizer_service/job/update/executor.h"

namespace ballast {

class Decider {
 public:
  // All outlive it.
  Decider(const JobCore& core, const JobMemory& memory, const Executor& executor,
          const StepMachine& machine, const StepLead& lead)
      : core_(core), memory_(memory), executor_(executor), machine_(machine), lead_(lead) {}

  // Of the step that this member's ranks have sealed, with its sums.
  StepReport MakeReport(PartSums sums) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Computes the update of the draft's unsettled groups, in this member's chunks. On an engine's
  // thread, while the gate says that the step is being decided.
  StateTrial Try(const Draft& draft) const;

  // At the lead: of the step with a summary of all reports; the draft, with all votes.
  StepNorm Norm() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  Draft MakeDraft() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  StepFacts Facts() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  GradientElement ElementAt(const ChunkPiece& piece) const;

  const JobCore& core_;
  const JobMemory& memory_;
  const Executor& executor_;
  const StepMachine& machine_;
  const StepLead& lead_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_DECIDER_H_
