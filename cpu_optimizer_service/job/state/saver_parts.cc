// A member's part of a save by its lead.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "cpu_optimizer_service/job/state/saver.h"
#include "cpu_optimizer_service/job/state/saving.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {
namespace {

// Said of four planes in one word, of at most 32 MiB.
constexpr int64_t kMostRuns = int64_t{1} << 17;

}  // namespace

bool Saver::TakePart(const Task& task) {
  const auto found = std::ranges::find(saves_, std::optional(task.id), &Saving::part);
  if (found == saves_.end()) return false;
  const std::shared_ptr<Saving> part = *found;
  if (const auto* end = std::get_if<Task::End>(&task.what)) {
    EndPart(part, end->saved);
    return true;
  }
  if (part->at_work) return true;  // It answers when that is done.
  if (part->last_done.round == task.round()) {
    say_({part->last_done});
    return true;
  }
  const auto* look = std::get_if<Task::Look>(&task.what);
  const bool has_looked =
      part->last_done.round == Task::RoundOf<Task::Look>() && part->last_done.status.ok();
  if (look == nullptr && !has_looked) return true;  // No lead asks for that.
  part->at_work = true;
  if (look != nullptr) {
    LookFor(part, look->directory);
  } else if (part->makes_memory) {
    part->starts_with_memory = true;
  } else {
    Start(part);
  }
  return true;
}

void Saver::BeginPart(uint64_t id, const Task::Pin& pin) {
  say_({MemberWord::Done{
      .task = id, .round = Task::RoundOf<Task::Pin>(), .status = PinPart(id, pin), .files = {}}});
}

absl::Status Saver::PinPart(uint64_t id, const Task::Pin& pin) {
  BALLAST_RETURN_IF_ERROR(view_.CheckThere());
  if (core_.environment.checkpoints == nullptr) {
    return WithReason(
        absl::FailedPreconditionError("it has no --checkpoint-dir; start it with that of the lead"),
        reason::kNoCheckpointDir);
  }
  if (pin.step != core_.record.committed_step || pin.loads != core_.record.loads ||
      !IsJobName(pin.folder)) {
    return absl::AbortedError(absl::StrCat("it is at step ", core_.record.committed_step,
                                           ", and the save is of step ", pin.step, " in ",
                                           pin.folder, "; save again"));
  }
  const auto part = std::make_shared<Saving>(
      SaveRequest{.folder = core_.environment.checkpoints->PathOf(pin.folder),
                  .asked_for = pin.asked_for},
      nullptr);
  part->part = id;
  part->last_done = {.task = id, .round = Task::RoundOf<Task::Pin>(), .status = {}, .files = {}};
  if (memory_.store->HasRoom(room_.get())) {
    if (const absl::Status pinned = Pin(*part);
        !pinned.ok() && !absl::IsResourceExhausted(pinned)) {
      return pinned;
    }
  }
  if (!part->snapshot.has_value()) {
    // As in SaveNow: the lead's next decision waits here until there is memory, or to the end.
    core_.gate.StartReading();
    part->makes_memory = true;
    core_.RunAfter([this, self = core_.KeepAlive(), part] {
      core_.environment.disk_threads->Run([this, self, part] { MakeRoomAndStart(part); });
    });
  }
  Enter(part);
  const CheckpointShare& share = part->writer->share();
  int64_t runs = 0;
  for (int parameter = 0; parameter < static_cast<int>(share.held.size()); ++parameter) {
    const bool is_whole = share.HasAll(part->writer->index(), parameter);
    runs += is_whole ? 0 : static_cast<int64_t>(share.held[parameter].runs().size());
  }
  if (runs <= kMostRuns) return absl::OkStatus();
  EndPart(part, "");
  return absl::FailedPreconditionError(absl::StrCat("it holds its parameters in ", runs,
                                                    " pieces, and a save has room for ", kMostRuns,
                                                    "; give each member whole rows of them"));
}

void Saver::LookFor(const std::shared_ptr<Saving>& part, const std::string& directory) {
  core_.RunAfter([this, self = core_.KeepAlive(), part, directory] {
    core_.environment.disk_threads->Run([this, self, part, directory] {
      const absl::Status sees = part->writer->Join(directory);
      JobCore::Section section(core_);
      SayDone(part, {.round = Task::RoundOf<Task::Look>(), .status = sees, .files = {}});
    });
  });
}

void Saver::SayDone(const std::shared_ptr<Saving>& part, MemberWord::Done done) {
  part->at_work = false;
  done.task = *part->part;
  part->last_done = std::move(done);
  say_({part->last_done});
}

void Saver::SayParts() {
  for (const std::shared_ptr<Saving>& saving : saves_) {
    if (saving->part.has_value()) say_({saving->last_done});
  }
}

void Saver::EndPart(const std::shared_ptr<Saving>& part, const std::string& saved) {
  part->cancelled = true;
  {
    MutexLock lock(part->mutex);
    part->status.Update(absl::CancelledError("the lead has ended the save"));
  }
  // One that still writes ends by itself.
  if (!part->writes || !part->at_work) Forget(part);
  if (!IsVersionName(saved)) return;
  core_.RunAfter([this, self = core_.KeepAlive(), folder = part->writer->folder(), saved] {
    core_.environment.disk_threads->Run([this, self, folder, saved] {
      const auto facts = ReadCheckpointFacts(
          *core_.environment.file_system, absl::StrCat(folder, "/", saved), kMostForeignIndexBytes);
      if (facts.ok()) core_.environment.checkpoints->Saved(folder, *facts);
    });
  });
}

}  // namespace ballast
