#include "cpu_optimizer_service/job/step/step_decision.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

using Overrides = std::map<int, HyperParameterOverrides>;

std::string DifferenceOfOverrides(const Overrides& a, const Overrides& b) {
  // Both sides, since a group may have overrides on one of them only.
  for (const auto* side : {&a, &b}) {
    for (const auto& [group, overrides] : *side) {
      const auto here = a.find(group);
      const auto there = b.find(group);
      if (here == a.end() || there == b.end()) {
        return absl::StrCat("overrides for group ", group, " on some ranks only");
      }
      if (here->second == there->second) continue;
      // Overrides have no text of their own. Over the same values their difference can be seen.
      const HyperParameters base;
      return absl::StrCat("overrides for group ", group, " {", ToString(Apply(base, there->second)),
                          "} where others have {", ToString(Apply(base, here->second)),
                          "}, over the defaults");
    }
  }
  return "";
}

std::string DifferenceOfTrainerStates(std::string_view a, std::string_view b) {
  if (a == b) return "";
  // The bytes are the trainer's, and may be anything, so only the place is named.
  const auto first = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first;
  return absl::StrCat("other settings: trainer_state differs at byte ", first - a.begin());
}

bool IsUnused(const StepFacts& facts, int parameter) {
  return IsUnused(facts.spec, facts.layout, facts.summary.uses, parameter);
}

std::vector<std::string> UnusedParameters(const StepFacts& facts) {
  std::vector<std::string> names;
  for (int p = 0; p < static_cast<int>(facts.update_counts.size()); ++p) {
    if (IsUnused(facts, p)) names.push_back(facts.spec.layout.parameters[p].name);
  }
  return names;
}

// By parameter, of the update; 0: it is left as it is.
std::vector<int64_t> UpdateCounts(const StepFacts& facts) {
  const bool skips_unused = facts.spec.unused_policy == UnusedPolicy::kSkip;
  std::vector<int64_t> counts;
  counts.reserve(facts.update_counts.size());
  for (int p = 0; p < static_cast<int>(facts.update_counts.size()); ++p) {
    // With the policy skip as in PyTorch: a parameter without a gradient is left as it is, and so
    // is its count, the exponent in the bias correction. With zero it is updated with zeros.
    const bool updated =
        facts.spec.layout.parameters[p].trainable && !(skips_unused && IsUnused(facts, p));
    counts.push_back(updated ? facts.update_counts[p] + 1 : 0);
  }
  return counts;
}

}  // namespace

std::string FirstDifference(const StepSettings& a, const StepSettings& b) {
  if (a.scale.loss_scale != b.scale.loss_scale) {
    return absl::StrCat("loss_scale ", b.scale.loss_scale, " where others have ",
                        a.scale.loss_scale);
  }
  if (a.scale.divisors.size() != b.scale.divisors.size()) {
    return absl::StrCat(b.scale.divisors.size(), " divisors where others have ",
                        a.scale.divisors.size());
  }
  for (size_t group = 0; group < a.scale.divisors.size(); ++group) {
    if (a.scale.divisors[group] != b.scale.divisors[group]) {
      return absl::StrCat("divisor ", b.scale.divisors[group], " of group ", group,
                          " where others have ", a.scale.divisors[group]);
    }
  }
  if (std::string difference = DifferenceOfOverrides(a.overrides, b.overrides);
      !difference.empty()) {
    return difference;
  }
  if (const std::string difference = FirstDifference(a.expected_clipping, b.expected_clipping);
      !difference.empty()) {
    return absl::StrCat("expected ", difference);
  }
  return DifferenceOfTrainerStates(a.trainer_state, b.trainer_state);
}

std::string FirstDifference(const StepVote& a, const StepVote& b) {
  if (a.apply != b.apply) {
    const auto says = [](const StepVote& vote) { return vote.apply ? "apply" : "abandon"; };
    return absl::StrCat(says(b), " where others have ", says(a));
  }
  if (std::string difference = FirstDifference(a.clipping, b.clipping); !difference.empty()) {
    return difference;
  }
  if (std::string difference = DifferenceOfOverrides(a.overrides, b.overrides);
      !difference.empty()) {
    return difference;
  }
  if (a.trainer_state.has_value() != b.trainer_state.has_value()) {
    return "a trainer_state on some ranks only";
  }
  return DifferenceOfTrainerStates(a.trainer_state.value_or(""), b.trainer_state.value_or(""));
}

absl::StatusOr<std::vector<HyperParameters>> WithOverrides(
    const JobSpec& spec, std::vector<HyperParameters> values,
    const std::map<int, HyperParameterOverrides>& overrides) {
  for (const auto& [group, changes] : overrides) {
    if (group < 0 || group >= static_cast<int>(values.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("overrides name group ", group, ", but the job has ", values.size()));
    }
    // All values are checked together: whether an lr is possible depends on the betas and on the
    // weight decay, too.
    BALLAST_RETURN_IF_ERROR(ValidateChanges(spec, group, values[group], changes));
    values[group] = Apply(values[group], changes);
  }
  return values;
}

absl::Status CheckVote(const JobSpec& spec, const StepTerms& terms, int rank,
                       const StepVote& vote) {
  const std::string context = absl::StrCat("rank ", rank, " votes on step ", terms.step);
  BALLAST_RETURN_IF_ERROR(
      Annotate(Validate(vote.clipping, static_cast<int>(spec.groups.size())), context));
  if (vote.trainer_state.has_value() && vote.trainer_state->size() > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(context, " with a trainer_state of ", vote.trainer_state->size(),
                     " bytes; expected at most ", kMaxTrainerStateBytes));
  }
  if (vote.overrides.empty()) return absl::OkStatus();
  return Annotate(WithOverrides(spec, terms.hyper_parameters, vote.overrides).status(), context);
}

absl::Status VotesDiffer(uint64_t step, int rank, const StepVote& vote, int first,
                         const StepVote& expected) {
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat("rank ", rank, " votes on step ", step, ": ",
                                                 FirstDifference(expected, vote), " (rank ", first,
                                                 "); all ranks must vote the same: vote again")),
      reason::kVoteAgain);
}

absl::Status CheckVotesAgree(uint64_t step, absl::Span<const RankInStep> ranks) {
  int first = -1;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (!ranks[rank].vote.has_value()) continue;
    // Compared with the lowest rank's, so that the message does not depend on who voted last.
    if (first == -1) first = rank;
    const StepVote& expected = *ranks[first].vote;
    if (*ranks[rank].vote == expected) continue;
    return VotesDiffer(step, rank, *ranks[rank].vote, first, expected);
  }
  return absl::OkStatus();
}

absl::Status RefuseVoteOfDiscarded(uint64_t step, int rank, uint32_t attempt, int by) {
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "step ", step, ": rank ", rank, " votes on attempt ", attempt, ", which rank ", by,
          " has discarded; discard it too, and give the step again")),
      reason::kDiscardAndRedo);
}

StepNorm NormOf(const StepFacts& facts) {
  const GradientScale& scale = facts.terms.settings.scale;
  return {.step = facts.terms.step,
          .attempt = facts.attempt,
          .norm = GlobalNorm(facts.summary.group_sums, scale),
          .group_norms = GroupNorms(facts.summary.group_sums, scale),
          .non_finite = facts.summary.non_finite,
          .unused_parameters = UnusedParameters(facts)};
}

bool Draft::is_settled() const {
  return !outcome.decision.apply ||
         std::ranges::all_of(bounds, [](const StateBounds& each) { return each.finite(); });
}

Draft DecideStep(const StepFacts& facts, const StepVote& vote) {
  const StepTerms& terms = facts.terms;
  Draft decided;
  StepOutcome& outcome = decided.outcome;
  outcome.step = terms.step;
  // Also where the ranks abandon the step: the norm is part of its record.
  outcome.decision = Decide(facts.summary.group_sums, terms.settings.scale, vote.clipping);
  outcome.unused_parameters = UnusedParameters(facts);
  if (!vote.apply) {
    outcome.decision.apply = false;
    // As of every skip: there is no update that they would belong to.
    outcome.decision.multipliers.clear();
    outcome.skip_cause = SkipCause::kAbandoned;
    outcome.skip_reason = "the ranks voted to abandon it";
  } else if (!outcome.decision.apply) {
    // Where every gradient is finite, it is the scale or the clipping that leaves no multiplier.
    outcome.skip_cause =
        facts.summary.non_finite.empty() ? SkipCause::kMultiplier : SkipCause::kGradient;
    outcome.skip_reason =
        facts.summary.non_finite.empty()
            ? "the norm, the loss scale and the clipping give a multiplier outside fp32"
            : facts.summary.non_finite;
  }
  // Also of a skip: its record says with which hyper-parameters it would have been applied.
  decided.update = {.step = terms.step,
                    .hyper_parameters = terms.hyper_parameters,
                    .multipliers = outcome.decision.multipliers,
                    .update_counts = UpdateCounts(facts)};
  for (const auto& [group, overrides] : vote.overrides) {
    // CheckVote has found that the group exists and the values are valid.
    HyperParameters& values = decided.update.hyper_parameters[group];
    values = Apply(values, overrides);
  }
  return decided;
}

}  // namespace ballast
