// Replaces a job's state by a checkpoint's, or by that of the step before.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_LOADER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_LOADER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/kept/journal.h"
#include "cpu_optimizer_service/job/members/tasks.h"
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
  // the lock (JobImpl::RaiseTo).
  using RaiseGeneration = std::function<void(const Generation& to, std::string why,
                                             absl::AnyInvocable<void() &&> then)>;
  // With several members; both are called under the lock.
  struct Others {
    MemberTasks& tasks;
    // At the lead: FAILED_PRECONDITION if some rank of another member has begun the next step.
    // UNAVAILABLE: one has no link, so that this is not known.
    std::function<absl::Status()> check_none_has_begun;
    // At the lead: whether all others have replaced their parts.
    std::function<bool()> have_loaded;
    // At another member: tells the lead how its part of this load has ended.
    std::function<void(uint64_t loads, const absl::Status& status)> tell_lead;
    std::function<void(MemberWord)> say;
  };

  // All outlive it.
  Loader(JobCore& core, JobMemory& memory, Journal& journal, const StateView& view, Saver& saver,
         StateOrigin& origin, RaiseGeneration raise_generation, Others others)
      : core_(core),
        memory_(memory),
        journal_(journal),
        view_(view),
        saver_(saver),
        origin_(origin),
        raise_generation_(std::move(raise_generation)),
        others_(std::move(others)) {}

  // As Job's calls.
  Pending Load(LoadRequest request, Done<CheckpointInfo> done);
  Pending Undo(UndoRequest request, Done<uint64_t> done);
  // A load that an earlier process did not finish. On a thread that may wait for the disk.
  void LoadAgain(const KeptLoad& load);

  // ---- A part of the lead's load.
  void Check(uint64_t task, const LeadWord::Task::Check& check)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // On a new link.
  void SayChecked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The lead does not load it.
  void Uncheck(uint64_t task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void LoadPart(const LeadWord::Load& load) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // False: the lead cannot mean this state.
  bool UndoPart(const LeadWord::Undo& undo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // ---- At the lead: whether other members are awaited; a member has replaced its part, or could
  // not.
  bool awaits_others() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return replaced_.has_value();
  }
  void OtherHasLoaded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { FinishIfAllHave(); }
  void OtherHasNot(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The job is being closed: from now on a load fails with this, and waits for no member. OK: it is
  // not closed after all.
  void EndWaits(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  bool has_others() const { return core_.spec().member_count() > 1; }
  // Its name for other members. FAILED_PRECONDITION: they know none.
  absl::StatusOr<std::string> NameOf(const OpenedCheckpoint& opened) const;
  // The others check their parts. Blocks.
  absl::Status CheckOthers(MemberTasks::Task& task, const LoadRequest& request,
                           const OpenedCheckpoint& opened);
  // Which elements this member loads; null: all.
  Checkpoint::Needs NeedsHere() const;
  // For what a lead names. INVALID_ARGUMENT, FAILED_PRECONDITION.
  absl::StatusOr<KeptLoad> NamedHere(const std::string& name, bool weights_only) const;
  absl::StatusOr<OpenedCheckpoint> OpenAndCheck(const LoadRequest& request) const;
  absl::Status CheckLoadable(const Checkpoint& checkpoint, bool convert_state) const;
  // Whether the job's formats hold the values.
  absl::Status CheckConverted(const Checkpoint& checkpoint) const;
  absl::StatusOr<OpenedCheckpoint> OpenToLoad(const LoadRequest& request) const;
  absl::Status LoadChunk(const Checkpoint& checkpoint, int chunk);
  // In the chunk's format, whatever the checkpoint's is.
  absl::Status LoadValues(const Checkpoint& checkpoint, const ChunkPiece& piece, const Slot& to);
  // For a load that began then.
  void ReplaceState(std::shared_ptr<OpenedCheckpoint> opened,
                    std::chrono::steady_clock::time_point began, Done<CheckpointInfo> done);
  // The planes are replaced, or half.
  struct Replaced {
    std::shared_ptr<OpenedCheckpoint> opened;
    std::chrono::steady_clock::time_point began;
    Done<CheckpointInfo> done;
    absl::Status status;
  };
  // Ends the load, unless other members are awaited.
  void FinishIfAllHave() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  bool WasUndone(const UndoRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckMayUndo(const UndoRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void UndoNow(const Generation& to, std::string why, Done<uint64_t> done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore& core_;
  JobMemory& memory_;
  Journal& journal_;
  const StateView& view_;
  Saver& saver_;
  StateOrigin& origin_;
  const RaiseGeneration raise_generation_;
  const Others others_;
  std::optional<Replaced> replaced_ ABSL_GUARDED_BY(job_lock);
  absl::Status waits_end_ ABSL_GUARDED_BY(job_lock);  // EndWaits.
  absl::Status other_has_not_ ABSL_GUARDED_BY(job_lock);
  void SayChecked(uint64_t task, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  struct Checked {
    uint64_t task = 0;
    std::shared_ptr<OpenedCheckpoint> opened;
  };
  Checked checked_ ABSL_GUARDED_BY(job_lock);  // A part that the lead is about to load.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_LOADER_H_
