// Who has given what: one integer per chunk, the next micro-step that is wanted.
//
// A contribution covers micro-steps [begin, end). It is new if begin is the next one, a repeat if
// all of it has been given, and anything else is an error. This holds three promises at once: no
// gradient lost, none counted twice, sums in micro-step order. A final contribution closes its
// chunk: from then on there are only repeats. Thread-compatible per chunk.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_LEDGER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_LEDGER_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast {

class Ledger {
 public:
  explicit Ledger(int64_t chunks) : entries_(chunks) {}

  enum class Verdict : uint8_t { kNew, kRepeat };
  // INVALID_ARGUMENT: an empty range. FAILED_PRECONDITION: it does not follow on, overlaps what has
  // been given in part, or is new to a closed chunk.
  absl::StatusOr<Verdict> Check(int64_t chunk, uint32_t begin, uint32_t end) const;
  // Precondition: Check said kNew.
  void Advance(int64_t chunk, uint32_t end, bool final = false) { entries_[chunk] = {end, final}; }

  uint32_t next_micro_step(int64_t chunk) const { return entries_[chunk].next_micro_step; }
  bool closed(int64_t chunk) const { return entries_[chunk].closed; }
  // Whether every chunk is at `micro_steps`.
  bool IsWhole(uint32_t micro_steps) const;
  void Clear() { entries_.assign(entries_.size(), {}); }
  void Clear(int64_t chunk) { entries_[chunk] = {}; }

 private:
  struct Entry {
    uint32_t next_micro_step = 0;
    bool closed = false;
  };
  std::vector<Entry> entries_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_GRADIENTS_LEDGER_H_
