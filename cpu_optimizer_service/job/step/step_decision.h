// What the ranks' votes and the norm make of a step: pure functions over what the ranks said. No
// lock, no clock, no memory of gradients.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_DECISION_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_DECISION_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"
#include "cpu_optimizer_service/job/step/step.h"

namespace ballast {

// Empty if both say the same; otherwise "loss_scale 2 where others have 1", `b` first.
std::string FirstDifference(const StepSettings& a, const StepSettings& b);
std::string FirstDifference(const StepVote& a, const StepVote& b);

// The groups' hyper-parameters with the overrides. INVALID_ARGUMENT for a group that is not the
// job's, or a value that it cannot have.
absl::StatusOr<std::vector<HyperParameters>> WithOverrides(
    const JobSpec& spec, std::vector<HyperParameters> values,
    const std::map<int, HyperParameterOverrides>& overrides);

// INVALID_ARGUMENT if a step that began with `terms` cannot be decided as the rank votes.
absl::Status CheckVote(const JobSpec& spec, const StepTerms& terms, int rank, const StepVote& vote);

// FAILED_PRECONDITION with the reason VOTE_AGAIN, naming the first rank that voted otherwise than
// those before it, and how.
absl::Status CheckVotesAgree(uint64_t step, absl::Span<const RankInStep> ranks);

// The refusal of a vote of `attempt`, which a rank, `by`, has discarded.
absl::Status RefuseVoteOfDiscarded(uint64_t step, int rank, uint32_t attempt, int by);

// What a step is decided from. All of it outlives the calls.
struct StepFacts {
  const JobSpec& spec;
  const Layout& layout;
  const SealedStep& step;                     // With its sums.
  const std::vector<int64_t>& update_counts;  // By parameter, before the step.
  const std::string& non_finite;  // Names the first element that is not finite; empty: all are.
};

StepNorm NormOf(const StepFacts& facts);

// What the step is, and the update that makes it so. It can still become a skip, where the update
// would leave state that is not finite.
struct DecidedUpdate {
  StepOutcome outcome;
  StepUpdate update;
};
// Precondition: all ranks have voted, and the same.
DecidedUpdate DecideStep(const StepFacts& facts);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_DECISION_H_
