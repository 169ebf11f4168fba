#include "cpu_optimizer_service/ledger.h"

#include "absl/strings/str_cat.h"

namespace ballast {

absl::StatusOr<Ledger::Verdict> Ledger::Judge(int64_t chunk, uint32_t begin, uint32_t end) const {
  if (begin >= end) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", chunk, ": micro-steps [", begin, ", ", end, ") are none"));
  }
  const uint32_t next = next_[chunk];
  if (begin == next) return Verdict::kNew;
  if (end <= next) return Verdict::kRepeat;
  return absl::FailedPreconditionError(absl::StrCat("chunk ", chunk, ": micro-steps [", begin, ", ",
                                                    end, ") came where micro-step ", next,
                                                    " is the next; send in order, each once"));
}

}  // namespace ballast
