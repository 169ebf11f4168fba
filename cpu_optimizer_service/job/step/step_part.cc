#include "cpu_optimizer_service/job/step/step_part.h"

#include <algorithm>
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
  // One rank may be micro-steps ahead of the others. How many there can be has been checked.
  if (uses_.size() <= micro_step) uses_.resize(micro_step + 1);
  if (used.all) {
    used_.assign(used_.size(), true);
    // The set goes where no neighbour shares it.
    used_sets_ -= uses_[micro_step].some.use_count() == 1 ? 1 : 0;
    uses_[micro_step] = {.all = true, .some = nullptr};
  } else {
    // Before anything else is changed, so that after a refusal the micro-step has not ended.
    if (!AddUses(micro_step, used.parameters)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("rank ", rank, " ends micro-step ", micro_step, " of step ", step,
                       ", but the used parameters have already changed ", kMaxUsedSets,
                       " times; set all_used and send zeros for unused ones, or use fewer "
                       "micro-steps"));
    }
    for (const int parameter : used.parameters) used_[parameter] = true;
    const bool nothing = used.parameters.empty();
    if (nothing && !state.reached_nothing.has_value()) state.reached_nothing = micro_step;
  }
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

bool StepPart::AddUses(uint32_t micro_step, const std::vector<int>& parameters) {
  Uses& uses = uses_[micro_step];
  if (uses.all || parameters.empty()) return true;
  std::vector<bool> some = uses.some != nullptr ? *uses.some : std::vector<bool>(used_.size());
  for (const int parameter : parameters) some[parameter] = true;
  if (uses.some != nullptr && *uses.some == some) return true;
  // A set that a neighbour shares stays after it has been replaced here.
  const size_t freed = uses.some.use_count() == 1 ? 1 : 0;
  // Most models use the same parameters in each micro-step, so that one set serves all of them.
  const UsedSet before = micro_step > 0 ? uses_[micro_step - 1].some : nullptr;
  if (before != nullptr && *before == some) {
    used_sets_ -= freed;
    uses.some = before;
    return true;
  }
  if (used_sets_ - freed >= kMaxUsedSets) return false;
  used_sets_ += 1 - freed;
  uses.some = std::make_shared<const std::vector<bool>>(std::move(some));
  return true;
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

std::optional<uint32_t> StepPart::FirstUse(int parameter, uint32_t begin, uint32_t end) const {
  for (uint32_t m = begin; m < std::min<size_t>(end, uses_.size()); ++m) {
    if (uses_[m].all || (uses_[m].some != nullptr && (*uses_[m].some)[parameter])) return m;
  }
  return std::nullopt;
}

void StepPart::Forget(int rank, absl::Span<const int> chunks) {
  ranks_[rank] = {};
  for (const int chunk : chunks) {
    ledger_.Clear(chunk);
    empties_.erase(chunk);
  }
}

void StepPart::ForgetLive() {
  used_.assign(used_.size(), false);
  uses_.clear();
  used_sets_ = 0;
  non_finite_.reset();
}

void StepPart::Clear() {
  ForgetLive();
  ledger_.Clear();
  empties_.clear();
  ranks_.assign(ranks_.size(), {});
}

}  // namespace ballast
