// Saves and loads of a job with several members: each does its part, and the lead decides.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

Pending JobImpl::Save(SaveRequest request, Done<CheckpointInfo> done) {
  OrthogonalizeIfAbandoned();
  if (core_.identity.is_lead()) return saver_.Save(std::move(request), std::move(done));
  JobCore::Section section(core_);
  if (request.asked_for) {
    core_.Reply<CheckpointInfo>(std::move(done), CheckLeads());
  } else {
    AskForSave(std::move(done));
  }
  return {};
}

Pending JobImpl::Load(LoadRequest request, Done<CheckpointInfo> done) {
  if (core_.identity.is_lead()) return loader_.Load(std::move(request), std::move(done));
  JobCore::Section section(core_);
  core_.Reply<CheckpointInfo>(std::move(done), CheckLeads());
  return {};
}

Pending JobImpl::UndoStep(UndoRequest request, Done<uint64_t> done) {
  if (core_.identity.is_lead()) return loader_.Undo(request, std::move(done));
  JobCore::Section section(core_);
  core_.Reply<uint64_t>(std::move(done), CheckLeads());
  return {};
}

// ---------------------------------------------------------------- the lead

void JobImpl::GiveUpOthers(const absl::Status& why) {
  seats_.GiveUp(why);
  const JobCore::Section section(core_);
  tasks_.GiveUp(why);
}

MemberTasks::Sent JobImpl::SendTo(int member, const LeadWord& word) {
  const Link& link = links_[member];
  const auto* task = std::get_if<LeadWord::Task>(&word.what);
  const bool is_over = task != nullptr && std::holds_alternative<LeadWord::Task::End>(task->what);
  if (link.sink == nullptr) return MemberTasks::Sent::kNot;
  if (!link.has_stood && !is_over) return MemberTasks::Sent::kLater;
  link.sink->Send(word);
  return MemberTasks::Sent::kNow;
}

void JobImpl::TakeFrom(int member, MemberWord::Done& done, std::vector<ToMember>& /*told*/) {
  tasks_.Hear(member, std::move(done));
}

void JobImpl::TakeFrom(int member, MemberWord::NotLoaded& not_loaded,
                       std::vector<ToMember>& /*told*/) {
  if (not_loaded.loads != core_.record.loads) return;
  loader_.OtherHasNot(Annotate(not_loaded.why, seats_.NameOf(member)));
}

bool JobImpl::OthersHaveLoaded() const {
  for (int member = 0; member < static_cast<int>(links_.size()); ++member) {
    const MemberWord::Standing& stands = links_[member].stands;
    const bool has = links_[member].sink != nullptr && stands.loads == core_.record.loads &&
                     stands.generation == core_.record.generation;
    if (member != core_.identity.member && !has) return false;
  }
  return true;
}

void JobImpl::TakeFrom(int member, MemberWord::WantsSave& wants, std::vector<ToMember>& /*told*/) {
  wanted_saves_.push_back({member, links_[member].number, wants.id});
  if (wanted_saves_.size() == 1) SaveForOthers();
}

void JobImpl::SaveForOthers() {
  if (core_.environment.checkpoints == nullptr) {
    return AnswerWanted(absl::FailedPreconditionError("the lead has no --checkpoint-dir"));
  }
  // Where this service ends, too, its own save may be over.
  const std::optional<CheckpointFacts> newest =
      core_.environment.checkpoints->NewestOf(core_.identity.uid);
  if (core_.environment.draining->load() && newest.has_value() &&
      newest->step == core_.record.committed_step &&
      newest->epoch == core_.record.generation.epoch &&
      newest->generation == core_.record.generation.count) {
    return AnswerWanted(CheckpointInfo{.directory = newest->directory,
                                       .step = newest->step,
                                       .generation = core_.record.generation,
                                       .size_bytes = newest->size_bytes});
  }
  core_.RunAfter([this, self = Self(), count = wanted_saves_.size()] {
    saver_.Save({.folder = core_.environment.checkpoints->PathOf(spec().name), .asked_for = false},
                [this, self, count](const absl::StatusOr<CheckpointInfo>& saved) {
                  const JobCore::Section section(core_);
                  // The job may have gone on until others asked.
                  const bool has_gone_on = saved.ok() && saved->step != DecidedStep();
                  if (has_gone_on && wanted_saves_.size() > count) return SaveForOthers();
                  AnswerWanted(saved);
                });
  });
}

void JobImpl::AnswerWanted(const absl::StatusOr<CheckpointInfo>& saved) {
  for (const WantedSave& wanted : std::exchange(wanted_saves_, {})) {
    // With an older link it has failed there.
    if (links_[wanted.member].number != wanted.link) continue;
    LeadWord::Saved word = {.id = wanted.id, .status = saved.status(), .name = ""};
    if (saved.ok()) {
      word.name = core_.environment.checkpoints->NameOf(saved->directory);
      word.step = saved->step;
      word.size_bytes = saved->size_bytes;
    }
    links_[wanted.member].sink->Send({std::move(word)});
  }
}

// ---------------------------------------------------------------- another member

void JobImpl::Take(LeadWord::Task& task) {
  if (const auto* check = std::get_if<LeadWord::Task::Check>(&task.what)) {
    return loader_.Check(task.id, *check);
  }
  if (const auto* pin = std::get_if<LeadWord::Task::Pin>(&task.what)) {
    return saver_.BeginPart(task.id, *pin);
  }
  if (saver_.TakePart(task)) return;
  if (std::holds_alternative<LeadWord::Task::End>(task.what)) return loader_.Uncheck(task.id);
  Say({MemberWord::Done{
      .task = task.id,
      .round = task.round(),
      .status = absl::UnavailableError("its process has ended since the save began"),
      .files = {}}});
}

void JobImpl::Take(LeadWord::Load& load) {
  if (load.loads <= core_.record.loads) return SayStanding();
  loader_.LoadPart(load);
}

void JobImpl::SayLoaded(uint64_t loads, const absl::Status& status) {
  if (status.ok()) return SayStanding();
  Say({MemberWord::NotLoaded{.loads = loads, .why = status}});
}

void JobImpl::AskForSave(Done<CheckpointInfo> done) {
  if (core_.gate.phase() == Phase::kClosed) {
    return core_.Reply<CheckpointInfo>(std::move(done), core_.StatusOf(Answer::kClosed));
  }
  if (to_lead_.sink == nullptr) {
    return core_.Reply<CheckpointInfo>(
        std::move(done), absl::UnavailableError(to_lead_.no_link.Of(
                             absl::StrCat(seats_.NameOf(spec().lead()), ", the lead,"))));
  }
  const uint64_t id = ++to_lead_.last_ask;
  to_lead_.saves.emplace(id, std::move(done));
  Say({MemberWord::WantsSave{id}});
}

void JobImpl::Take(LeadWord::Saved& saved) {
  auto found = to_lead_.saves.extract(saved.id);
  if (found.empty()) return;
  absl::StatusOr<CheckpointInfo> result = CheckpointInfo{.directory = std::move(saved.name),
                                                         .step = saved.step,
                                                         .generation = core_.record.generation,
                                                         .size_bytes = saved.size_bytes};
  if (!saved.status.ok()) result = saved.status;
  core_.Reply<CheckpointInfo>(std::move(found.mapped()), std::move(result));
}

void JobImpl::FailSaves(const absl::Status& why) {
  for (auto& [id, done] : std::exchange(to_lead_.saves, {})) {
    core_.Reply<CheckpointInfo>(std::move(done), why);
  }
}

}  // namespace ballast
