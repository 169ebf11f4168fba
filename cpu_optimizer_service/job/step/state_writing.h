// A write of state in progress: its parameters, the values so far, and their memory until all have
// arrived. Before that nothing of it shows in the job.
//
// The values have memory of their own: chunk by chunk, and within a chunk plane by plane. If the
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
#include "cpu_optimizer_service/common/packed/slot.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/memory_budget.h"

namespace ballast {

// INVALID_ARGUMENT, for people. `what`: "exp_avg_sq of h.0.w".
absl::Status BadValue(absl::string_view what, Plane plane, float value, int64_t element);

class StateWriting {
 public:
  // `layout` outlives it.
  StateWriting(StateWrite write, const Layout& layout);

  const StateWrite& write() const { return write_; }
  absl::Span<const int> chunks() const { return chunks_; }  // The changed ones, ascending.
  int64_t bytes() const { return begins_.back() * static_cast<int64_t>(sizeof(float)); }
  // Of bytes(); null if that is 0. `label` names it for a later process.
  void UseMemory(std::string label, std::unique_ptr<Arena> memory,
                 MemoryBudget::Reservation reservation);
  const std::string& label() const { return label_; }

  // The chunk's elements of each of the planes. Ignores other parameters' elements.
  // INVALID_ARGUMENT: a value that no update leaves; then the chunk is unchanged.
  absl::Status WriteChunk(int chunk, absl::Span<const float> values);
  // The same for elements of one parameter, row-major from `offset` on.
  absl::Status WriteRange(int parameter, Plane plane, int64_t offset,
                          absl::Span<const float> values);
  // Copies a chunk's written values to its slot.
  void CopyTo(int chunk, const Slot& slot) const;

  using Ended = absl::AnyInvocable<void(absl::StatusOr<bool>) &&>;
  // A rank's part. Each id is unique, and not 0.
  struct Part {
    uint64_t id = 0;           // 0: no part yet.
    std::vector<int> missing;  // Chunks, ascending.
    Ended done;                // Null until the part is complete and waits for others.
  };
  // Begins the rank's part again. Returns the earlier one's Done, as DropPart.
  Ended BeginPart(int rank, uint64_t id);
  Part* FindPart(int rank, uint64_t id);  // Null: no such part.
  Ended DropPart(int rank);               // Null: nobody waits.
  // Ranks whose part has begun, or has not.
  std::vector<int> RanksThat(bool take_part) const;
  bool HasEnded(int rank) const { return parts_[rank].done != nullptr; }
  bool complete() const;
  // A rank has begun the step without it, so it cannot be completed. Ranks that end a part are told
  // so.
  void Refuse(absl::Status why) { refused_ = std::move(why); }
  const absl::Status& refused() const { return refused_; }
  std::vector<Ended> TakeDones();

 private:
  bool Writes(int parameter) const;
  // Null: the chunk does not change. The planes lie one behind the other.
  float* At(int chunk) const;
  absl::Status CheckValues(int parameter, Plane plane, absl::Span<const float> values,
                           int64_t first) const;

  const StateWrite write_;
  const Layout& layout_;
  const std::vector<int> chunks_;
  std::vector<int64_t> begins_;  // The begin of each chunk's values, and the end of all.
  std::string label_;
  MemoryBudget::Reservation reservation_;
  std::unique_ptr<Arena> memory_;
  std::vector<Part> parts_;  // By rank.
  absl::Status refused_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STATE_WRITING_H_
