#include "cpu_optimizer_service/job/step/step_part.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

absl::Status StepPart::EndMicroStep(uint64_t step, int rank, bool is_live, uint32_t micro_step,
                                    const UsedParameters& used) {
  Rank& state = ranks_[rank];
  if (micro_step != state.micro_steps_ended) {
    return absl::FailedPreconditionError(absl::StrCat("rank ", rank, " ends micro-step ",
                                                      micro_step, " of step ", step, ", expected ",
                                                      state.micro_steps_ended));
  }
  if (!is_live) {  // It will be discarded.
    ++state.micro_steps_ended;
    return absl::OkStatus();
  }
  // Before anything is changed, so that after a refusal the micro-step has not ended.
  if (!uses_.Add(micro_step, used)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("rank ", rank, " ends micro-step ", micro_step, " of step ", step,
                     ", but the used parameters have already changed ", kMaxUsedSets,
                     " times; set all_used and send zeros for unused ones, or use fewer "
                     "micro-steps"));
  }
  const bool nothing = !used.all && used.parameters.empty();
  if (nothing && !state.reached_nothing.has_value()) state.reached_nothing = micro_step;
  ++state.micro_steps_ended;
  if (used.non_finite.has_value()) {
    // The lowest one, and not the first to arrive: the report does not depend on timing.
    const bool first =
        !non_finite_.has_value() ||
        std::pair(micro_step, rank) < std::pair(non_finite_->micro_step, non_finite_->rank);
    if (first) non_finite_ = {.rank = rank, .micro_step = micro_step, .found = *used.non_finite};
  }
  return absl::OkStatus();
}

void StepPart::RecordEmpty(int chunk, uint32_t begin, uint32_t end) {
  std::vector<MicroSteps>& empties = empties_[chunk];
  // The ledger takes a chunk's micro-steps in ascending order, so only the last range can grow.
  if (!empties.empty() && empties.back().end == begin) {
    empties.back().end = end;
  } else {
    empties.push_back({begin, end});
  }
}

void StepPart::Forget(int rank, absl::Span<const int> chunks) {
  ranks_[rank] = {};
  for (const int chunk : chunks) {
    ledger_.Clear(chunk);
    empties_.erase(chunk);
  }
}

void StepPart::ForgetLive() {
  uses_.Clear();
  non_finite_.reset();
}

void StepPart::Clear() {
  ForgetLive();
  ledger_.Clear();
  empties_.clear();
  ranks_.assign(ranks_.size(), {});
}

}  // namespace ballast
