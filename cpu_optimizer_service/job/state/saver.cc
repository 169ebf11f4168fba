#include "cpu_optimizer_service/job/state/saver.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "cpu_optimizer_service/job/state/saving.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {
namespace {

// Files of one save that are written at once.
constexpr int kStreams = 6;
// How often a save beside steps looks whether it has become one that the service's end waits for.
constexpr std::chrono::seconds kLookForTheEnd(1);

int64_t UnixMilliseconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

}  // namespace

Pending Saver::Save(SaveRequest request, Done<CheckpointInfo> done) {
  const auto saving = std::make_shared<Saving>(std::move(request), std::move(done));
  const auto number = std::make_shared<uint64_t>(0);
  if (absl::Status fits = CheckFolder(saving->request); !fits.ok()) {
    std::move(saving->done)(std::move(fits));
    return {};
  }
  core_.Enter(
      Admission::kSnapshot, -1,
      [this, self = core_.KeepAlive(), saving, number](absl::Status admitted)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
            if (admitted.ok() && Joins(*saving)) return;
            if (admitted.ok()) admitted = CheckMaySave(saving->request);
            if (!admitted.ok())
              return core_.Reply<CheckpointInfo>(std::move(saving->done), admitted);
            SaveNow(saving, number);
          },
      number);
  // Weak, both: a caller may keep its Pending for long, and that must keep neither the job's memory
  // nor the pins.
  return Pending(
      [this, weak = std::weak_ptr(core_.KeepAlive()), weak_saving = std::weak_ptr(saving), number] {
        const auto alive = weak.lock();
        const auto saving = weak_saving.lock();
        if (alive == nullptr || saving == nullptr) return;
        JobCore::Section section(core_);
        core_.gate.Cancel(*number);  // No call has number 0.
        Cancel(saving);
      });
}

// Others know the folder by its name.
absl::Status Saver::CheckFolder(const SaveRequest& request) const {
  const CheckpointDirectory* const checkpoints = core_.environment.checkpoints;
  const std::string name = std::filesystem::path(request.folder).filename().string();
  if (!has_others() || (checkpoints != nullptr && checkpoints->PathOf(name) == request.folder)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", core_.spec().name, " has several members, which save only to a name under ",
      "their --checkpoint-dir, not to ", request.folder));
}

absl::Status Saver::CheckMaySave(const SaveRequest& request) const {
  BALLAST_RETURN_IF_ERROR(view_.CheckThere());
  const auto same = static_cast<size_t>(
      std::count_if(saves_.begin(), saves_.end(), [&](const std::shared_ptr<Saving>& other) {
        return other->request.asked_for == request.asked_for;
      }));
  if (same < kMostSaves) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(same, " saves of job ", core_.spec().name,
                   " are under way; wait until one has ended (ballast job shows them)"));
}

bool Saver::Joins(Saving& saving) {
  if (!has_others() || saving.request.asked_for || !core_.environment.draining->load())
    return false;
  for (const std::shared_ptr<Saving>& other : saves_) {
    if (other->request.folder != saving.request.folder || other->request.asked_for ||
        other->request.background || other->info.step != core_.record.committed_step ||
        other->info.generation != core_.record.generation) {
      continue;
    }
    other->done = [first = std::move(other->done),
                   second = std::move(saving.done)](absl::StatusOr<CheckpointInfo> saved) mutable {
      std::move(first)(saved);
      std::move(second)(std::move(saved));
    };
    return true;
  }
  return false;
}

void Saver::SaveIfDue() {
  if (core_.environment.checkpoints == nullptr || !core_.identity.is_lead()) return;
  const uint64_t step = core_.record.committed_step;
  const CheckpointPolicy& policy = core_.environment.checkpoints->policy();
  const SaveSchedule::Time now = Saving::Clock::now();
  const bool is_due_next = schedule.IsDueNext(policy, step, now);
  if (!schedule.IsDue(policy, step, now)) {
    // While the next step goes on, memory is made for the save at its commit.
    if (is_due_next && !memory_.store->HasRoom(room_.get())) {
      core_.RunAfter([this, self = core_.KeepAlive()] {
        core_.environment.saving_threads->Run([this, self] { (void)MakeRoom(); });
      });
    }
    return;
  }
  // One that is under way takes longer than it should; the next is due when it has ended.
  for (const std::shared_ptr<Saving>& other : saves_) {
    if (other->request.asked_for) continue;
    if (!std::exchange(other->told_that_next_is_due, true)) {
      core_.Warn(absl::StrCat("job ", core_.spec().name, ": the save of step ", other->info.step,
                              " is still under way at step ", step,
                              ", where the next is due; that begins after it"));
    }
    return;
  }
  // Counted from here, however the save ends: one that fails is tried again when the next is due.
  schedule.SavedAt(step, now);
  // Before the ranks are told of the commit, so that no later step is saved.
  core_.RunAfter([this, self = core_.KeepAlive(), step] {
    Save({.folder = core_.environment.checkpoints->PathOf(core_.spec().name), .asked_for = false},
         [this, self, step](const absl::StatusOr<CheckpointInfo>& saved) {
           if (!saved.ok()) WarnOfSave(step, saved.status());
         });
  });
}

void Saver::TakeOver() {
  if (core_.environment.checkpoints == nullptr) return;
  const std::optional<CheckpointFacts> newest =
      core_.environment.checkpoints->NewestOf(core_.identity.uid);
  if (!newest.has_value()) return;
  // The clock may have gone back since.
  const int64_t ago = std::max<int64_t>(UnixMilliseconds() - newest->saved_unix_ms, 0);
  // An undo may have gone back behind the newest checkpoint.
  schedule.SavedAt(std::min(newest->step, core_.record.committed_step),
                   Saving::Clock::now() - std::chrono::milliseconds(ago));
}

void Saver::WarnOfSave(uint64_t step, const absl::Status& why) const {
  core_.Warn(absl::StrCat("job ", core_.spec().name, " was not saved at step ", step, ": ",
                          why.message(), "; earlier checkpoints remain"));
}

void Saver::SaveNow(std::shared_ptr<Saving> saving, std::shared_ptr<uint64_t> number) {
  // To make slots of named memory takes long, and is not done under the lock. Where none has to be
  // made the save pins now, and steps go on beside it.
  const bool has_room = memory_.store->HasRoom(room_.get());
  if (has_room) {
    const absl::Status pinned = Pin(*saving);
    if (pinned.ok()) {
      Enter(saving);
      return Start(std::move(saving));
    }
    if (!absl::IsResourceExhausted(pinned)) {
      ++counts_.failed;
      return core_.Reply<CheckpointInfo>(std::move(saving->done), pinned);
    }
  }
  // Otherwise the save becomes a reader, for which the next decision waits. Slots are made on a
  // thread that may wait, and then the pins take the reader's place. Where the budget has no room
  // for them, it reads to its end.
  const uint64_t waits = core_.EnterHere(
      Admission::kRead, -1,
      [this, self = core_.KeepAlive(), saving,
       has_room](absl::Status admitted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
        if (admitted.ok()) admitted = CheckMaySave(saving->request);
        if (!admitted.ok()) {
          return core_.Reply<CheckpointInfo>(std::move(saving->done), admitted);
        }
        core_.gate.StartReading();
        Enter(saving);
        if (has_room) return Start(saving);
        saving->makes_memory = true;
        core_.RunAfter([this, self, saving] {
          core_.environment.disk_threads->Run([this, self, saving] { MakeRoomAndStart(saving); });
        });
      });
  if (waits != 0) *number = waits;
}

absl::Status Saver::Pin(Saving& saving) {
  std::vector<int> chunks(core_.layout.chunks().size());
  std::iota(chunks.begin(), chunks.end(), 0);
  const std::unique_ptr<ChunkStore::Room> room = std::move(room_);
  BALLAST_ASSIGN_OR_RETURN(saving.snapshot,
                           view_.SnapshotOf({}, chunks, /*keep_alive=*/nullptr, room.get()));
  return absl::OkStatus();
}

void Saver::Enter(const std::shared_ptr<Saving>& saving) {
  const SaveRequest& request = saving->request;
  saving->began = Saving::Clock::now();
  saving->info = {.directory = request.folder,
                  .step = core_.record.committed_step,
                  .generation = core_.record.generation};
  // A copy: the record goes on with the steps, and the checkpoint is of this one.
  CheckpointIndex index = view_.MakeIndex(core_.record);
  index.saved_unix_ms = UnixMilliseconds();
  index.asked_for = request.asked_for;
  CheckpointWriter::Target target = {.folder = request.folder};
  if (has_others()) {
    target.most_index_bytes = std::min(MostIndexBytes(core_.spec()), kMostForeignIndexBytes);
    target.share = ShareOf(index);
  }
  saving->writer = std::make_unique<CheckpointWriter>(*core_.environment.file_system,
                                                      std::move(target), std::move(index));
  saves_.push_back(saving);
  if (saving->part.has_value()) return;
  if (has_others()) {
    // What follows it on a link, a decision above all, is heard after it.
    saving->others = tasks_.Begin();
    tasks_.Ask(*saving->others,
               Task::Pin{.step = saving->info.step,
                         .loads = core_.record.loads,
                         .folder = std::filesystem::path(request.folder).filename().string(),
                         .asked_for = request.asked_for});
  }
  if (!request.background) return;
  core_.Reply<CheckpointInfo>(std::move(saving->done), saving->info);
  saving->done = [this, self = core_.KeepAlive(),
                  step = saving->info.step](const absl::StatusOr<CheckpointInfo>& saved) {
    if (!saved.ok()) WarnOfSave(step, saved.status());
  };
}

CheckpointShare Saver::ShareOf(const CheckpointIndex& index) const {
  CheckpointShare share = {.member = core_.identity.member};
  for (const CheckpointIndex::Parameter& parameter : index.parameters) {
    ElementRuns& held = share.held.emplace_back();
    core_.layout.VisitRange(
        core_.layout.FindParameter(parameter.name), 0, parameter.elements,
        [&](const ChunkPiece& piece) { held.Add(piece.parameter_offset, piece.elements); });
  }
  return share;
}

absl::Status Saver::MakeRoom() {
  MutexLock making(making_room_);
  {
    JobCore::Lock lock(core_);
    if (memory_.store->HasRoom(room_.get())) return absl::OkStatus();
  }
  const auto progress = core_.BeginActivity(ActivityKind::kMakingSecondVersions, 0);
  const CountsIn here(*progress);
  {
    JobCore::Lock lock(core_);
    room_progress_ = progress;
  }
  absl::StatusOr<std::unique_ptr<ChunkStore::Room>> made = memory_.store->MakeRoom();
  std::unique_ptr<ChunkStore::Room> room;
  JobCore::Lock lock(core_);
  room_progress_ = nullptr;
  BALLAST_RETURN_IF_ERROR(made.status());
  room = *std::move(made);
  // What was there before goes after the lock.
  room_.swap(room);
  return absl::OkStatus();
}

void Saver::MakeRoomAndStart(const std::shared_ptr<Saving>& saving) {
  // Without the lock, which steps and streams want: in named memory this makes files with all their
  // pages.
  const absl::Status made = MakeRoom();
  JobCore::Section section(core_);
  saving->makes_memory = false;
  if (saving->cancelled) return;
  if (!made.ok()) {
    core_.Tell(absl::StrCat("steps wait for the save of step ", saving->info.step,
                            ", because there is no memory for second versions: ", made.message()));
  }
  if (made.ok() && Pin(*saving).ok()) {
    core_.gate.StopReading();
  }
  if (!saving->part.has_value() || saving->starts_with_memory) Start(saving);
}

void Saver::Start(std::shared_ptr<Saving> saving) {
  // A disk may be slow or hang, so neither this thread nor the engine's wait for it; and a save
  // that holds steps back does not wait for those that do not.
  HelperThreads& threads = saving->snapshot.has_value() ? *core_.environment.saving_threads
                                                        : *core_.environment.disk_threads;
  core_.RunAfter([this, &threads, self = core_.KeepAlive(), saving = std::move(saving)] {
    threads.Run([this, self, saving] { Begin(saving); });
  });
}

void Saver::Begin(const std::shared_ptr<Saving>& saving) {
  // A helper may come to it when all is written, and a part's is gone.
  std::shared_ptr<Progress> progress;
  {
    JobCore::Lock lock(core_);
    if (saving->cancelled) return;
    // From here on there may be files, so a cancel comes too late.
    saving->writes = true;
    progress = core_.BeginActivity(ActivityKind::kWritingCheckpoint, saving->writer->size_bytes(),
                                   saving->writer->folder());
    saving->progress = progress;
  }
  const CountsIn here(*progress);
  // The lead has made that of a part.
  const absl::Status begun = saving->part.has_value() ? absl::OkStatus() : MakeDirectory(*saving);
  if (!begun.ok()) return End(saving, begun);
  // Steps go on beside a snapshot, and should not notice it. What they wait for, or the end of the
  // service, gets its share of the processors.
  const bool in_background =
      saving->snapshot.has_value() && !core_.environment.draining->load(std::memory_order_relaxed);
  HelperThreads& threads =
      in_background ? *core_.environment.writing_threads : *core_.environment.disk_threads;
  // This thread writes, too, unless the save is to leave the processors to steps.
  const int helpers = std::min(kStreams, saving->writer->parts()) - (in_background ? 0 : 1);
  for (int helper = 0; helper < helpers; ++helper) {
    threads.Run([this, self = core_.KeepAlive(), saving, progress] {
      const CountsIn helper_here(*progress);
      WriteParts(saving);
    });
  }
  if (!in_background) WriteParts(saving);  // Else this thread only waits.
  absl::Status first_error;
  {
    MutexLock lock(saving->mutex);
    // End gives the directory its name or removes it, so no thread may write there any more.
    while (saving->writing > 0 || saving->has_more()) {
      saving->part_ended.WaitUntil(saving->mutex, Saving::Clock::now() + kLookForTheEnd);
      if (!saving->has_more() || !core_.environment.draining->load(std::memory_order_relaxed))
        continue;
      // The service is to end, and this is what it waits for.
      saving->mutex.Unlock();
      WriteParts(saving);
      saving->mutex.Lock();
    }
    first_error = saving->status;
  }
  if (first_error.ok() && saving->others != nullptr) first_error = AddOthers(*saving);
  End(saving, first_error);
}

absl::Status Saver::MakeDirectory(Saving& saving) {
  if (saving.others == nullptr) return saving.writer->Begin();
  BALLAST_RETURN_IF_ERROR(saving.others->Await());
  BALLAST_RETURN_IF_ERROR(saving.writer->Begin());
  // Before anything is written.
  {
    JobCore::Section section(core_);
    tasks_.Ask(*saving.others, Task::Look{saving.writer->partial()});
  }
  BALLAST_RETURN_IF_ERROR(saving.others->Await());
  JobCore::Section section(core_);
  tasks_.Ask(*saving.others, Task::Write());
  return absl::OkStatus();
}

absl::Status Saver::AddOthers(Saving& saving) {
  BALLAST_RETURN_IF_ERROR(saving.others->Await());
  saving.writer->Add(saving.others->TakeFiles());
  return absl::OkStatus();
}

void Saver::WriteParts(const std::shared_ptr<Saving>& saving) {
  const auto read = [&](int parameter, Plane stored, int64_t first, absl::Span<std::byte> out) {
    const std::string& name = saving->writer->index().parameters[parameter].name;
    // The index leaves out frozen parameters, so its numbers are not those of the job.
    const int p = core_.layout.FindParameter(name);
    if (saving->snapshot.has_value()) {
      saving->snapshot->ReadStored(p, stored, first, out);
    } else {
      view_.ReadStored(p, stored, first, out);
    }
  };
  absl::Status status;
  for (int part = -1;;) {
    {
      MutexLock lock(saving->mutex);
      if (part >= 0) {
        --saving->writing;
        saving->status.Update(status);
        saving->part_ended.NotifyAll();
      }
      // Also after an error, which makes all further parts pointless.
      if (!saving->has_more()) return;
      part = saving->next_part++;
      ++saving->writing;
    }
    status = saving->writer->WritePart(part, read);
  }
}

void Saver::End(const std::shared_ptr<Saving>& saving, const absl::Status& status) {
  if (saving->part.has_value()) {
    JobCore::Section section(core_);
    Unpin(saving);
    saving->progress = nullptr;
    if (saving->cancelled) return Forget(saving);
    MemberWord::Done done = {.round = Task::RoundOf<Task::Write>(), .status = status};
    if (status.ok()) done.files = saving->writer->Files();
    return SayDone(saving, std::move(done));
  }
  absl::StatusOr<CheckpointInfo> result = saving->info;
  const absl::StatusOr<CheckpointFacts> facts = saving->writer->Finish(status);
  if (facts.ok()) {
    result->directory = facts->directory;
    result->size_bytes = facts->size_bytes;
    if (core_.environment.checkpoints != nullptr) {
      core_.environment.checkpoints->Saved(saving->writer->folder(), *facts);
    }
  } else {
    result = facts.status();
  }
  // Last of all: at any instant there is a complete checkpoint, and the hint names one that stays.
  std::vector<std::string> deleted;
  if (facts.ok()) deleted = DeleteOlderThan(*facts, saving->writer->folder());
  {
    JobCore::Section section(core_);
    if (facts.ok()) {
      ++counts_.complete;
      counts_.last_saved_unix_ms = facts->saved_unix_ms;
    } else {
      ++counts_.failed;
    }
    TellOf(*saving, result);
    for (const std::string& line : deleted) core_.Tell(line);
    if (saving->others != nullptr && facts.ok()) {
      tasks_.End(*saving->others,
                 Task::End{std::filesystem::path(facts->directory).filename().string()});
      saving->others = nullptr;
    }
    Forget(saving);
  }
  std::move(saving->done)(std::move(result));
}

std::vector<std::string> Saver::DeleteOlderThan(const CheckpointFacts& saved,
                                                const std::string& folder) {
  FileSystem& files = *core_.environment.file_system;
  CheckpointDirectory* const known = core_.environment.checkpoints;
  const CheckpointPolicy policy = known != nullptr ? known->policy() : CheckpointPolicy();
  const std::optional<int> keep = saved.asked_for ? policy.keep_asked : policy.keep;
  std::vector<CheckpointFacts> deleted;
  if (keep.has_value()) {
    deleted = DeleteOlder(files, *core_.environment.checkpoint_uses, folder, core_.identity.uid,
                          saved.asked_for, *keep);
  }
  // Also what people have deleted since the last save.
  if (known != nullptr) known->ForgetMissing(files, folder);
  std::vector<std::string> lines;
  for (const CheckpointFacts& each : deleted) {
    lines.push_back(absl::StrCat("deleted step ", each.step, " in ", each.directory, ", which ",
                                 each.asked_for
                                     ? "a call had asked for: --checkpoint-keep-asked="
                                     : "the service had saved by itself: --checkpoint-keep=",
                                 *keep, " newer ones stay"));
  }
  return lines;
}

void Saver::TellOf(const Saving& saving, const absl::StatusOr<CheckpointInfo>& result) {
  if (result.ok()) {
    return core_.Tell(absl::StrCat("saved step ", result->step, " in ", result->directory, ": ",
                                   FormatBytes(result->size_bytes), " in ",
                                   std::round(10 * SecondsSince(saving.began)) / 10, " s"));
  }
  // A save that nobody waits for warns of it itself.
  if (!saving.request.asked_for || saving.request.background) return;
  core_.Tell(absl::StrCat("not saved at step ", saving.info.step, ": ", result.status().message()));
}

void Saver::Cancel(const std::shared_ptr<Saving>& saving) {
  // Without a writer the save has not begun. If it waited in the gate, Cancel there has answered
  // it.
  if (saving->writer == nullptr || saving->writes || saving->cancelled) return;
  saving->cancelled = true;
  Forget(saving);
  core_.Reply<CheckpointInfo>(std::move(saving->done), core_.StatusOf(std::nullopt));
}

void Saver::Forget(const std::shared_ptr<Saving>& saving) {
  std::erase(saves_, saving);
  if (saving->others != nullptr) tasks_.End(*saving->others, Task::End());
  Unpin(saving);
}

void Saver::Unpin(const std::shared_ptr<Saving>& saving) {
  if (std::exchange(saving->is_unpinned, true)) return;
  if (!saving->snapshot.has_value()) {
    core_.gate.StopReading();
    return;
  }
  // Unmapping takes long; the caller is told after it.
  core_.RunAfter([snapshot = std::move(saving->snapshot)]() mutable { snapshot.reset(); });
}

std::vector<SaveProgress> Saver::UnderWay() const {
  std::vector<SaveProgress> saves;
  for (const std::shared_ptr<Saving>& saving : saves_) {
    if (saving->part.has_value() && saving->is_unpinned) continue;  // It is written.
    const CheckpointWriter& writer = *saving->writer;
    const std::chrono::duration<double> seconds = Saving::Clock::now() - saving->began;
    const Progress* const progress =
        saving->makes_memory ? room_progress_.get() : saving->progress.get();
    saves.push_back(
        {.directory = writer.folder(),
         .step = saving->info.step,
         .seconds = seconds.count(),
         .seconds_since_progress =
             progress != nullptr ? progress->seconds_since_progress() : seconds.count(),
         .written_bytes = saving->progress != nullptr ? saving->progress->done_bytes() : 0,
         .size_bytes = writer.size_bytes(),
         .holds_back_decisions = !saving->snapshot.has_value(),
         .makes_memory = saving->makes_memory});
  }
  return saves;
}

}  // namespace ballast
