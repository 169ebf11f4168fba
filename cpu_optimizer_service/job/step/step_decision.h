// A step's decision from the ranks' votes and the norm: pure functions over the ranks' input,
// without lock, clock or memory of gradients.
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
#include "cpu_optimizer_service/common/state_bounds.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"
#include "cpu_optimizer_service/job/step/step_agreement.h"
#include "cpu_optimizer_service/job/step/step_report.h"

namespace ballast {

// Empty if both are equal; otherwise "loss_scale 2 where others have 1", `b` first.
std::string FirstDifference(const StepSettings& a, const StepSettings& b);
std::string FirstDifference(const StepVote& a, const StepVote& b);

// The groups' hyper-parameters with the overrides. INVALID_ARGUMENT for an unknown group, or an
// invalid value.
absl::StatusOr<std::vector<HyperParameters>> WithOverrides(
    const JobSpec& spec, std::vector<HyperParameters> values,
    const std::map<int, HyperParameterOverrides>& overrides);

// INVALID_ARGUMENT if a step with these `terms` cannot be decided by this vote.
absl::Status CheckVote(const JobSpec& spec, const StepTerms& terms, int rank, const StepVote& vote);

// FAILED_PRECONDITION with the reason VOTE_AGAIN: `rank` voted otherwise than `first`.
absl::Status VotesDiffer(uint64_t step, int rank, const StepVote& vote, int first,
                         const StepVote& expected);
// As VotesDiffer, of the first rank that voted otherwise than those before it.
absl::Status CheckVotesAgree(uint64_t step, absl::Span<const RankInStep> ranks);

// The refusal of a vote of `attempt`, which a rank, `by`, has discarded.
absl::Status RefuseVoteOfDiscarded(uint64_t step, int rank, uint32_t attempt, int by);

// A decision's input. All of it outlives the calls.
struct StepFacts {
  const JobSpec& spec;
  const Layout& layout;  // For the parameters' sizes.
  const StepTerms& terms;
  uint32_t attempt = 0;
  const StepSummary& summary;
  const std::vector<int64_t>& update_counts;  // By parameter, before the step.
};

StepNorm NormOf(const StepFacts& facts);

// The step's decision and its update. It can still become a skip, if the update would make state
// non-finite.
struct Draft {
  StepOutcome outcome;
  StepUpdate update;
  std::vector<StateBounds> bounds;  // By group, of the state after the update: Decider.

  // Whether no try is needed.
  bool is_settled() const;
};
// `vote`: that of all ranks.
Draft DecideStep(const StepFacts& facts, const StepVote& vote);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_DECISION_H_
