// Writes of state between two steps: by the ranks, each for its own elements, or by an operator.
//
// The values have memory of their own until all have arrived. Then one flip of the record makes
// them the job's state, also for a process that takes over. The copies that follow may be repeated.
// Then the record is flipped once more.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_WRITES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_WRITES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/core/membership.h"
#include "cpu_optimizer_service/job/kept/journal.h"
#include "cpu_optimizer_service/job/state/state_view.h"
#include "cpu_optimizer_service/job/step/state_writing.h"
#include "cpu_optimizer_service/job/step/step_machine.h"

namespace ballast {

class StateWrites {
 public:
  using StateWriter = Job::StateWriter;

  // All outlive it.
  StateWrites(JobCore& core, JobMemory& memory, Membership& members, Journal& journal,
              const StateView& view, const StepMachine& machine)
      : core_(core),
        memory_(memory),
        members_(members),
        journal_(journal),
        view_(view),
        machine_(machine) {}

  // As Job's calls for writes of state.
  absl::StatusOr<StateWriter> Begin(const RankHolder& holder, StateWrite write);
  absl::Status WriteChunk(const StateWriter& writer, int64_t chunk,
                          absl::Span<const absl::Span<const std::byte>> payload);
  Pending End(const StateWriter& writer, Done<bool> done);
  void Drop(const StateWriter& writer);
  absl::StatusOr<std::unique_ptr<StateWriting>> Prepare(StateWrite write);
  Pending Commit(std::shared_ptr<StateWriting> writing, Done<uint64_t> done);

  // Whether the rank has ended its part of the write in progress.
  bool HasEnded(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return writing_ != nullptr && writing_->HasEnded(rank);
  }
  bool under_way() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return writing_ != nullptr; }
  // Before a rank begins a step: FAILED_PRECONDITION if ranks still write before it.
  absl::Status CheckEnded(int rank, uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The rank's part of a write no longer counts.
  void DropPart(int rank, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A rank has begun the step without it: ranks with an ended part are told now, others later.
  void Refuse(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // For a job that was taken over.
  absl::Status TakeOver(std::string& story) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  absl::Status CheckMayBegin(int rank, const StateWrite& write) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WriteNow(const StateWriting& writing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void CopyWritten(const StateWriting& writing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore& core_;
  JobMemory& memory_;
  Membership& members_;
  Journal& journal_;
  const StateView& view_;
  const StepMachine& machine_;
  std::shared_ptr<StateWriting> writing_ ABSL_GUARDED_BY(job_lock);  // By ranks. May be null.
  uint64_t last_writer_ ABSL_GUARDED_BY(job_lock) = 0;
  std::atomic<uint64_t> last_memory_ = 0;  // For the names of their memory.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_STATE_WRITES_H_
