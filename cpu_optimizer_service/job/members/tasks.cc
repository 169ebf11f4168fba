#include "cpu_optimizer_service/job/members/tasks.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/steady_time.h"

namespace ballast {
namespace {

using Clock = std::chrono::steady_clock;

// A link that ends is opened again, or its host is gone.
constexpr std::chrono::seconds kPatience(30);
constexpr std::chrono::milliseconds kLookForLinks(200);

// Of all processes of the lead.
uint64_t RandomId() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

}  // namespace

MemberTasks::Task::Task(const MemberTasks& tasks)
    : tasks_(tasks), members_(tasks.spec_.member_count()) {
  word_.id = RandomId();
}

absl::Status MemberTasks::Task::Await() {
  MutexLock lock(mutex_);
  while (true) {
    bool has_all = true;
    for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
      const Member& each = members_[member];
      if (each.has_answered) continue;
      has_all = false;
      if (!each.lost.has_value() || Clock::now() - *each.lost < kPatience) continue;
      status_.Update(
          absl::UnavailableError(absl::StrCat(tasks_.NameOf(member), " has not answered for ",
                                              kPatience.count(), " s: ", each.why_lost)));
    }
    if (has_all || !status_.ok()) return status_;
    changed_.WaitUntil(mutex_, Clock::now() + kLookForLinks);
  }
}

void MemberTasks::Task::Miss(int member, std::string why) {
  MutexLock lock(mutex_);
  Member& missed = members_[member];
  if (!missed.lost.has_value()) missed.lost = Clock::now();
  missed.why_lost = std::move(why);
}

std::vector<CheckpointIndex::File> MemberTasks::Task::TakeFiles() {
  MutexLock lock(mutex_);
  return std::exchange(files_, {});
}

std::shared_ptr<MemberTasks::Task> MemberTasks::Begin() {
  const std::shared_ptr<Task> task(new Task(*this));
  tasks_.push_back(task);
  return task;
}

void MemberTasks::Ask(Task& task, What what) {
  LeadWord::Task word;
  {
    MutexLock lock(task.mutex_);
    task.word_.what = std::move(what);
    for (int member = 0; member < static_cast<int>(task.members_.size()); ++member) {
      task.members_[member].has_answered = member == spec_.lead();
    }
    word = task.word_;
  }
  for (int member = 0; member < spec_.member_count(); ++member) {
    if (member == spec_.lead()) continue;
    const Sent sent = send_(member, {word});
    if (sent == Sent::kNot) task.Miss(member, "it has no link");
    if (sent == Sent::kLater) task.Miss(member, "it does not stand behind the lead yet");
  }
}

void MemberTasks::End(Task& task, std::optional<LeadWord::Task::End> what) {
  SetStatus(task, absl::CancelledError("it is over"));
  MutexLock lock(task.mutex_);
  for (int member = 0; member < spec_.member_count() && what.has_value(); ++member) {
    if (member != spec_.lead()) send_(member, {LeadWord::Task{task.word_.id, *what}});
  }
  std::erase_if(tasks_, [&](const auto& each) { return each.get() == &task; });
}

void MemberTasks::Hear(int member, MemberWord::Done done) {
  for (const auto& task : tasks_) {
    {
      MutexLock lock(task->mutex_);
      if (task->word_.id != done.task) continue;
      if (task->word_.round() != done.round || task->members_[member].has_answered) return;
      task->members_[member].has_answered = true;
      if (std::holds_alternative<LeadWord::Task::Write>(task->word_.what)) {
        task->files_.insert(task->files_.end(), std::make_move_iterator(done.files.begin()),
                            std::make_move_iterator(done.files.end()));
      }
    }
    return SetStatus(*task, Annotate(done.status, NameOf(member)));
  }
  // Of an earlier process of this lead, or ended meanwhile.
  send_(member, {LeadWord::Task{done.task, LeadWord::Task::End()}});
}

void MemberTasks::Lose(int member, const absl::Status& why) {
  for (const auto& task : tasks_) {
    task->Miss(member, absl::StrCat("it has no link: ", std::string(why.message())));
  }
}

void MemberTasks::Link(int member) {
  for (const auto& task : tasks_) {
    LeadWord::Task word;
    {
      MutexLock lock(task->mutex_);
      task->members_[member].lost.reset();
      if (task->members_[member].has_answered || !task->status_.ok()) continue;
      word = task->word_;
    }
    send_(member, {std::move(word)});
  }
}

std::map<int, std::string> MemberTasks::WaitsFor() const {
  constexpr const char* kRounds[] = {"pinned its part of a save", "looked for the folder of a save",
                                     "written its part of a save", "checked its part of a load",
                                     ""};
  std::map<int, std::string> awaited;
  for (const auto& task : tasks_) {
    MutexLock lock(task->mutex_);
    for (int member = 0; member < spec_.member_count(); ++member) {
      const Task::Member& each = task->members_[member];
      if (each.has_answered || !task->status_.ok()) continue;
      std::string& text = awaited[member];
      absl::StrAppend(&text, text.empty() ? "" : "; ", NameOf(member), " has not ",
                      kRounds[task->word_.round()], each.lost.has_value() ? ": " : "",
                      each.lost.has_value() ? each.why_lost : "");
    }
  }
  return awaited;
}

void MemberTasks::GiveUp(const absl::Status& why) {
  for (const auto& task : tasks_) SetStatus(*task, why);
}

void MemberTasks::SetStatus(Task& task, const absl::Status& status) {
  MutexLock lock(task.mutex_);
  task.status_.Update(status);
  task.changed_.NotifyAll();
}

}  // namespace ballast
