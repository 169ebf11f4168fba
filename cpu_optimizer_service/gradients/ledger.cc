#include "cpu_optimizer_service/gradients/ledger.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ballast {

absl::StatusOr<Ledger::Verdict> Ledger::Check(int64_t chunk, uint32_t begin, uint32_t end) const {
  if (begin >= end) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", chunk, ": micro-steps [", begin, ", ", end, ") hold no micro-step"));
  }
  const auto [next, closed] = entries_[chunk];
  // Asked first: a worker whose stream broke sends again what was not acknowledged, also of a
  // closed chunk.
  if (end <= next) return Verdict::kRepeat;
  if (closed) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", chunk, ": micro-steps [", begin, ", ", end,
                     ") came after the final contribution, which ended before micro-step ", next,
                     "; send no more for this chunk in this step"));
  }
  // A range that begins earlier and ends later would count its first micro-steps twice; one that
  // begins later would leave a gap. Neither can be mended here.
  if (begin == next) return Verdict::kNew;
  return absl::FailedPreconditionError(absl::StrCat("chunk ", chunk, ": got micro-steps [", begin,
                                                    ", ", end, "), expected micro-step ", next,
                                                    " next; send them in order, each once"));
}

bool Ledger::IsWhole(uint32_t micro_steps) const {
  return std::all_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.next_micro_step == micro_steps; });
}

}  // namespace ballast
