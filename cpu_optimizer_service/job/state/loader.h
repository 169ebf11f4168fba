// Replaces a job's state by a checkpoint's, or by that of the step before.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_LOADER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_LOADER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/kept/journal.h"
#include "cpu_optimizer_service/job/state/saver.h"
#include "cpu_optimizer_service/job/state/state_origin.h"
#include "cpu_optimizer_service/job/state/state_view.h"
#include "cpu_optimizer_service/state/checkpoint.h"

namespace ballast {

class Loader {
 public:
  using LoadRequest = Job::LoadRequest;
  using UndoRequest = Job::UndoRequest;
  // Clears the undecided step and frees all ranks, which get the reason; then calls `then`, under
  // the lock (JobImpl::RaiseGeneration).
  using RaiseGeneration = std::function<void(std::string why, absl::AnyInvocable<void() &&> then)>;

  // All outlive it.
  Loader(JobCore& core, JobMemory& memory, Journal& journal, const StateView& view, Saver& saver,
         StateOrigin& origin, RaiseGeneration raise_generation)
      : core_(core),
        memory_(memory),
        journal_(journal),
        view_(view),
        saver_(saver),
        origin_(origin),
        raise_generation_(std::move(raise_generation)) {}

  // As Job's calls.
  Pending Load(LoadRequest request, Done<CheckpointInfo> done);
  Pending Undo(UndoRequest request, Done<uint64_t> done);
  // A load that an earlier process did not finish. On a thread that may wait for the disk.
  void LoadAgain(const LoadRequest& request);

 private:
  absl::Status CheckLoadable(const Checkpoint& checkpoint) const;
  absl::StatusOr<OpenedCheckpoint> OpenToLoad(const LoadRequest& request) const;
  absl::Status LoadChunk(const Checkpoint& checkpoint, int chunk);
  // For a load that began then.
  void ReplaceState(OpenedCheckpoint& opened, std::chrono::steady_clock::time_point began,
                    Done<CheckpointInfo> done);
  bool WasUndone(const UndoRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckMayUndo(const UndoRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void UndoNow(Done<uint64_t> done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore& core_;
  JobMemory& memory_;
  Journal& journal_;
  const StateView& view_;
  Saver& saver_;
  StateOrigin& origin_;
  const RaiseGeneration raise_generation_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_LOADER_H_
