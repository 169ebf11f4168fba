// Loads of a job with several members: what the lead asks of the others, and what these do.
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "cpu_optimizer_service/job/state/loader.h"

namespace ballast {

Checkpoint::Needs Loader::NeedsHere() const {
  if (!has_others()) return nullptr;
  return [this](const std::string& parameter, int64_t begin, int64_t elements) {
    const int p = core_.layout.FindParameter(parameter);
    bool any = false;
    if (p == -1 || !core_.spec().layout.parameters[p].trainable) return any;
    elements = std::min(elements, core_.layout.place(p).elements - begin);
    if (elements <= 0) return any;
    core_.layout.VisitRange(p, begin, begin + elements, [&](const ChunkPiece&) { any = true; });
    return any;
  };
}

absl::StatusOr<std::string> Loader::NameOf(const OpenedCheckpoint& opened) const {
  const CheckpointDirectory* const checkpoints = core_.environment.checkpoints;
  std::string name = checkpoints != nullptr ? checkpoints->NameOf(opened.directory) : "";
  if (IsCheckpointName(name)) return name;
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", core_.spec().name, " has several members, which load only a name under their ",
      "--checkpoint-dir; ", opened.directory, " is not one"));
}

absl::Status Loader::CheckOthers(MemberTasks::Task& task, const LoadRequest& request,
                                 const OpenedCheckpoint& opened) {
  BALLAST_ASSIGN_OR_RETURN(const std::string name, NameOf(opened));
  {
    JobCore::Section section(core_);
    others_.tasks.Ask(task, LeadWord::Task::Check{.name = name,
                                                  .weights_only = request.weights_only,
                                                  .sha256 = opened.checkpoint.index().sha256});
  }
  return task.Await();
}

void Loader::OtherHasNot(const absl::Status& why) {
  if (!core_.record.loading.has_value()) return;
  if (!replaced_.has_value()) return other_has_not_.Update(why);
  replaced_->status.Update(why);
  FinishIfAllHave();
}

void Loader::EndWaits(const absl::Status& why) {
  waits_end_ = why;
  if (!why.ok()) OtherHasNot(why);
}

void Loader::SayChecked(uint64_t task, const absl::Status& status) {
  others_.say({MemberWord::Done{.task = task,
                                .round = LeadWord::Task::RoundOf<LeadWord::Task::Check>(),
                                .status = status,
                                .files = {}}});
}

void Loader::SayChecked() {
  if (checked_.opened != nullptr) SayChecked(checked_.task, absl::OkStatus());
}

void Loader::Check(uint64_t task, const LeadWord::Task::Check& check) {
  if (checked_.task == task) return SayChecked();  // Or it answers when it has opened it.
  if (checked_.task != 0) {
    SayChecked(checked_.task, absl::AbortedError("another load of the job has begun"));
  }
  checked_ = {.task = task, .opened = nullptr};
  absl::StatusOr<KeptLoad> load = NamedHere(check.name, check.weights_only);
  if (!load.ok()) return SayChecked(task, load.status());
  load->sha256 = check.sha256;
  core_.RunAfter([this, self = core_.KeepAlive(), load = *std::move(load), task] {
    core_.environment.disk_threads->Run([this, self, load, task] {
      absl::StatusOr<OpenedCheckpoint> opened =
          OpenAndCheck({.path = load.path,
                        .weights_only = load.weights_only,
                        .convert_state = true});  // The lead has asked.
      if (opened.ok() && opened->checkpoint.index().sha256 != load.sha256) {
        opened = absl::FailedPreconditionError(
            absl::StrCat("it has another checkpoint in ", load.path,
                         "; give all members a --checkpoint-dir on one shared file system"));
      }
      JobCore::Section section(core_);
      if (checked_.task != task) return;  // Ended, or answered.
      if (opened.ok()) {
        checked_.opened = std::make_shared<OpenedCheckpoint>(*std::move(opened));
        return SayChecked();
      }
      checked_ = {};
      SayChecked(task, opened.status());
    });
  });
}

absl::StatusOr<KeptLoad> Loader::NamedHere(const std::string& name, bool weights_only) const {
  if (!IsCheckpointName(name)) {
    return absl::InvalidArgumentError(absl::StrCat("its lead named '", absl::Utf8SafeCEscape(name),
                                                   "', which is no name of a checkpoint"));
  }
  if (core_.environment.checkpoints == nullptr) {
    return WithReason(
        absl::FailedPreconditionError("it has no --checkpoint-dir; start it with that of the lead"),
        reason::kNoCheckpointDir);
  }
  return KeptLoad{.path = core_.environment.checkpoints->PathOf(name),
                  .weights_only = weights_only};
}

void Loader::Uncheck(uint64_t task) {
  if (checked_.task != task) return;
  core_.RunAfter([opened = std::exchange(checked_, {}).opened] {});
}

void Loader::LoadPart(const LeadWord::Load& load) {
  absl::StatusOr<KeptLoad> named = NamedHere(load.name, load.weights_only);
  if (!named.ok()) return others_.tell_lead(load.loads, named.status());
  named->loads = load.loads;
  named->sha256 = load.sha256;
  core_.record.loading = *named;
  journal_.Keep();
  core_.gate.StartLoading();
  std::shared_ptr<OpenedCheckpoint> opened = std::exchange(checked_, {}).opened;
  core_.EnterHere(Admission::kReplaceState, -1,
                  [this, self = core_.KeepAlive(), load = *std::move(named),
                   opened = std::move(opened)](absl::Status /*admitted*/)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
                        core_.RunAfter([this, self, load, opened] {
                          core_.environment.disk_threads->Run([this, self, load, opened] {
                            const bool is_it = opened != nullptr &&
                                               opened->checkpoint.index().sha256 == load.sha256;
                            if (!is_it) return LoadAgain(load);
                            ReplaceState(opened, std::chrono::steady_clock::now(),
                                         [](const absl::StatusOr<CheckpointInfo>&) {});
                          });
                        });
                      });
}

}  // namespace ballast
