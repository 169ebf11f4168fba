// Saves of a job: several threads of low priority write a checkpoint's files from pinned chunks,
// while the job goes on.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_SAVER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_SAVER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/members/tasks.h"
#include "cpu_optimizer_service/job/state/state_view.h"
#include "cpu_optimizer_service/state/checkpoint_writer.h"
#include "cpu_optimizer_service/state/save_schedule.h"

namespace ballast {

class Saver {
 public:
  using SaveRequest = Job::SaveRequest;

  // All outlive it. `tasks`: of the lead of other members. `say`: from another member to its lead.
  Saver(JobCore& core, JobMemory& memory, const StateView& view, MemberTasks& tasks,
        std::function<void(MemberWord)> say)
      : core_(core), memory_(memory), view_(view), tasks_(tasks), say_(std::move(say)) {}

  // As Job::Save.
  Pending Save(SaveRequest request, Done<CheckpointInfo> done);
  // This member's part of a save by its lead: it begins, where a step allows a snapshot; and what
  // the lead asks for next. False: there is no such part.
  void BeginPart(uint64_t id, const LeadWord::Task::Pin& pin)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  bool TakePart(const LeadWord::Task& task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // On a new link: what has been done last of each part.
  void SayParts() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // After a commit: saves if the service's policy requires it.
  void SaveIfDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // For a job that was taken over: the schedule follows its newest checkpoint.
  void TakeOver() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  std::vector<SaveProgress> UnderWay() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  const SaveCounts& counts() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return counts_; }

  SaveSchedule schedule ABSL_GUARDED_BY(job_lock){std::chrono::steady_clock::now()};

 private:
  struct Saving;
  using Task = LeadWord::Task;
  bool has_others() const { return core_.spec().member_count() > 1; }
  absl::Status CheckFolder(const SaveRequest& request) const;
  absl::Status CheckMaySave(const SaveRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Members that are told to end at once ask for one save: takes part in one of this state.
  bool Joins(Saving& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WarnOfSave(uint64_t step, const absl::Status& why) const;
  void SaveNow(std::shared_ptr<Saving> saving, std::shared_ptr<uint64_t> number)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // From now on the save is in progress.
  void Enter(const std::shared_ptr<Saving>& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Pins the save's chunks, so that steps go on beside it. RESOURCE_EXHAUSTED.
  absl::Status Pin(Saving& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // What this member holds.
  CheckpointShare ShareOf(const CheckpointIndex& index) const;
  // Memory for pinning all chunks; on a thread that may wait.
  absl::Status MakeRoom() ABSL_LOCKS_EXCLUDED(making_room_, job_lock);
  // The same, for a save that meanwhile holds decisions back; without memory, until its end.
  void MakeRoomAndStart(const std::shared_ptr<Saving>& saving);
  void Start(std::shared_ptr<Saving> saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // On a thread that may wait for a disk.
  void Begin(const std::shared_ptr<Saving>& saving);
  // Makes the directory, once other members have pinned, and sees that these see it.
  absl::Status MakeDirectory(Saving& saving);
  // Waits for the files of others.
  absl::Status AddOthers(Saving& saving);
  void WriteParts(const std::shared_ptr<Saving>& saving);
  void End(const std::shared_ptr<Saving>& saving, const absl::Status& status);
  // Returns lines about deletions because `saved`, in its folder, is newer.
  std::vector<std::string> DeleteOlderThan(const CheckpointFacts& saved, const std::string& folder);
  void TellOf(const Saving& saving, const absl::StatusOr<CheckpointInfo>& result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status PinPart(uint64_t id, const Task::Pin& pin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void LookFor(const std::shared_ptr<Saving>& part, const std::string& directory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void EndPart(const std::shared_ptr<Saving>& part, const std::string& saved)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void SayDone(const std::shared_ptr<Saving>& part, MemberWord::Done done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Gives up a save that has not begun to write.
  void Cancel(const std::shared_ptr<Saving>& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Forget(const std::shared_ptr<Saving>& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Its pins, or its place as a reader.
  void Unpin(const std::shared_ptr<Saving>& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore& core_;
  JobMemory& memory_;
  const StateView& view_;
  MemberTasks& tasks_;
  const std::function<void(MemberWord)> say_;
  std::vector<std::shared_ptr<Saving>> saves_ ABSL_GUARDED_BY(job_lock);  // Oldest first.
  SaveCounts counts_ ABSL_GUARDED_BY(job_lock);
  Mutex making_room_;  // One thread at a time, before the job's lock.
  std::unique_ptr<ChunkStore::Room> room_
      ABSL_GUARDED_BY(job_lock);  // For the next save. Nullable.
  std::shared_ptr<Progress> room_progress_ ABSL_GUARDED_BY(job_lock);  // While it is made.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STATE_SAVER_H_
