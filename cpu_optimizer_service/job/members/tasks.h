// At a lead: what it has the other members do for a save, or before a load. A task has rounds: in
// each all of them are asked, and answer.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_TASKS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_TASKS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/members/words.h"

namespace ballast {

// Under the job's lock, except Await and TakeFiles.
class MemberTasks {
 public:
  using What = decltype(LeadWord::Task::what);
  // kLater: the member does not stand behind the lead yet, and is asked when it does (Link).
  enum class Sent : uint8_t { kNow, kLater, kNot };
  using Send = std::function<Sent(int member, const LeadWord& word)>;

  class Task {
   public:
    // Blocks until all have answered the round. Otherwise the first error, with the member's name.
    // UNAVAILABLE: one has had no link for half a minute.
    absl::Status Await();
    // What all have written, after that.
    std::vector<CheckpointIndex::File> TakeFiles();

   private:
    friend class MemberTasks;
    struct Member {
      bool has_answered = true;  // Nothing has been asked yet.
      std::optional<std::chrono::steady_clock::time_point> lost;  // Since when it cannot hear.
      std::string why_lost;
    };
    explicit Task(const MemberTasks& tasks);
    void Miss(int member, std::string why);

    const MemberTasks& tasks_;
    Mutex mutex_;
    CondVar changed_;
    LeadWord::Task word_ ABSL_GUARDED_BY(mutex_);
    std::vector<Member> members_ ABSL_GUARDED_BY(mutex_);  // The lead has answered everything.
    absl::Status status_ ABSL_GUARDED_BY(mutex_);
    std::vector<CheckpointIndex::File> files_ ABSL_GUARDED_BY(mutex_);
  };

  // The spec outlives it.
  MemberTasks(const JobSpec& spec, Send send) : spec_(spec), send_(std::move(send)) {}

  std::shared_ptr<Task> Begin();
  // A round.
  void Ask(Task& task, What what);
  // Others hear of it, unless `what` is empty.
  void End(Task& task, std::optional<LeadWord::Task::End> what);

  void Hear(int member, MemberWord::Done done);
  void Lose(int member, const absl::Status& why);
  // Asks again what a new link's member has not answered.
  void Link(int member);
  // Who has not answered, with a line for people.
  std::map<int, std::string> WaitsFor() const;
  // All end with this.
  void GiveUp(const absl::Status& why);

 private:
  std::string NameOf(int member) const { return "member " + spec_.members[member].address; }
  static void SetStatus(Task& task, const absl::Status& status);

  const JobSpec& spec_;
  const Send send_;
  std::vector<std::shared_ptr<Task>> tasks_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_TASKS_H_
