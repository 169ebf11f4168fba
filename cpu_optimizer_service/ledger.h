// Who has given what: one integer per chunk, the next micro-step that is wanted.
//
// A contribution covers micro-steps [begin, end). It is new if begin is the next one, a repeat if
// all of it has been given, and anything else is an error. This holds three promises at once: no
// gradient lost, none counted twice, sums in micro-step order. Thread-compatible per chunk.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_LEDGER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_LEDGER_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast {

class Ledger {
 public:
  explicit Ledger(int64_t chunks) : next_(chunks, 0) {}

  enum class Verdict : uint8_t { kNew, kRepeat };
  // INVALID_ARGUMENT: an empty range. FAILED_PRECONDITION: it does not follow on, or overlaps what
  // has been given in part.
  absl::StatusOr<Verdict> Judge(int64_t chunk, uint32_t begin, uint32_t end) const;
  void Advance(int64_t chunk, uint32_t end) { next_[chunk] = end; }

  uint32_t next_micro_step(int64_t chunk) const { return next_[chunk]; }
  void Clear() { next_.assign(next_.size(), 0); }

 private:
  std::vector<uint32_t> next_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_LEDGER_H_
