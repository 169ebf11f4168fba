// A write of state that is under way: what it names, what of it has come, and where that lies until
// all of it is there. Nothing of it shows in the job before.
//
// The values lie in memory of their own: chunk by chunk, and in a chunk plane by plane. Where the
// job outlives the process, so does that memory, and a process that takes over copies it again.
//
// Thread-compatible: the job's lock guards one that ranks write together.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STATE_WRITING_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STATE_WRITING_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/state/slot.h"

namespace ballast {

// The first value that no update leaves in such a plane: one that is not finite, or, of a plane of
// squares, below zero.
std::optional<int64_t> FirstBadValue(Plane plane, absl::Span<const float> values);
// INVALID_ARGUMENT, for people. `what`: "exp_avg_sq of h.0.w".
absl::Status BadValue(absl::string_view what, Plane plane, float value, int64_t element);

class StateWriting {
 public:
  // `layout` outlives it.
  StateWriting(StateWrite write, const Layout& layout);

  const StateWrite& write() const { return write_; }
  absl::Span<const int> chunks() const { return chunks_; }  // Those that it changes, ascending.
  int64_t bytes() const { return begins_.back() * static_cast<int64_t>(sizeof(float)); }
  // Of bytes(); null where that is 0. `label` names it for a later process.
  void UseMemory(std::string label, std::unique_ptr<Arena> memory,
                 MemoryBudget::Reservation reservation);
  const std::string& label() const { return label_; }

  // Of a chunk: its elements of each of the planes. What is not of the parameters is not looked at.
  // INVALID_ARGUMENT: a value that no update leaves; then the chunk is as it was.
  absl::Status WriteChunk(int chunk, absl::Span<const float> values);
  // The same for elements of one parameter, row-major from `offset` on.
  absl::Status WriteRange(int parameter, Plane plane, int64_t offset,
                          absl::Span<const float> values);
  // Copies what is written of a chunk to its slot.
  void CopyTo(int chunk, const Slot& slot) const;

  using Ended = absl::AnyInvocable<void(absl::StatusOr<bool>) &&>;
  // What a rank brings. Each id is another one, and not 0.
  struct Part {
    uint64_t id = 0;           // 0: nothing, so far.
    std::vector<int> missing;  // Chunks, ascending.
    Ended done;                // Null until the part is whole and waits for the others.
  };
  // Begins the rank's part anew. Returns the Done of the one before, as DropPart.
  Ended BeginPart(int rank, uint64_t id);
  Part* FindPart(int rank, uint64_t id);  // Null: there is no such part any more.
  Ended DropPart(int rank);               // Null: nobody waits.
  // Those whose part has begun, or has not.
  std::vector<int> RanksThat(bool take_part) const;
  bool HasEnded(int rank) const { return parts_[rank].done != nullptr; }
  bool complete() const;
  std::vector<Ended> TakeDones();

 private:
  bool Writes(int parameter) const;
  // Null: it changes nothing of the chunk. The planes lie one behind the other.
  float* At(int chunk) const;
  absl::Status CheckValues(int parameter, Plane plane, absl::Span<const float> values,
                           int64_t first) const;

  const StateWrite write_;
  const Layout& layout_;
  const std::vector<int> chunks_;
  std::vector<int64_t> begins_;  // Of the values of each of chunks_, and the end of all.
  std::string label_;
  MemoryBudget::Reservation reservation_;
  std::unique_ptr<Arena> memory_;
  std::vector<Part> parts_;  // By rank.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STATE_WRITING_H_
