// What the parts of a job share: its identity, its small state, its lock, its gate, and work for
// after the lock.
//
// One lock guards all input of the ranks. Arithmetic, listeners, disks and unmapping happen outside
// it. Code that changes the gate's answers takes the lock by a Section. When the section ends,
// waiting calls get their turn. Then the work left for afterwards runs without the lock.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_CORE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_CORE_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/state_bounds.h"
#include "cpu_optimizer_service/common/system/helper_threads.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "cpu_optimizer_service/host/trace.h"
#include "cpu_optimizer_service/job/core/gate.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/core/traffic_counter.h"
#include "cpu_optimizer_service/job/job.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "cpu_optimizer_service/state/checkpoint_uses.h"

namespace ballast {

class JobImpl;

// What a job shares with the engine's other jobs; all outlive it.
struct JobEnvironment {
  MemoryBudget* budget = nullptr;
  TaskPool* tasks = nullptr;              // Arithmetic.
  HelperThreads* disk_threads = nullptr;  // For loads, and for saves that hold steps back.
  // For saves beside steps: threads that begin, wait and end, and threads of the lowest priority
  // that write for them. The first end before the second.
  HelperThreads* saving_threads = nullptr;
  HelperThreads* writing_threads = nullptr;
  ArenaFactory* arenas = nullptr;
  FileSystem* file_system = nullptr;
  CheckpointDirectory* checkpoints = nullptr;  // Nullable.
  CheckpointUses* checkpoint_uses = nullptr;
  const std::atomic<bool>* draining = nullptr;
  std::function<void(const std::string&)> warn;  // In one line. Nullable.
  std::function<void(const JobEvent&)> tell;     // Nullable, too.
  Activities* activities = nullptr;
  NamedMemory* named_memory = nullptr;  // May be null: jobs end with this process.
  // Called when the last first weights of a job have arrived that is to replace another one.
  std::function<void(std::shared_ptr<JobImpl>)> take_place;
  // Called when a job from which another one is derived has changed.
  std::function<void(const Job&)> moved;
};

// Stands for the lock of whichever job a function works on, so that clang's analysis follows it
// through all parts of a job. It does not distinguish the locks of two jobs.
struct ABSL_LOCKABLE JobLock {};
inline JobLock job_lock;

class JobCore {
 public:
  // `job` owns the core.
  JobCore(const Job& job, JobIdentity identity, Layout layout, const JobEnvironment& environment);

  const JobIdentity identity;
  const Layout layout;
  const JobEnvironment environment;
  const JobSpec& spec() const { return identity.spec; }

  // Only the lock: waiting calls get no turn.
  class ABSL_SCOPED_LOCKABLE Lock {
   public:
    explicit Lock(const JobCore& core) ABSL_EXCLUSIVE_LOCK_FUNCTION(job_lock);
    ~Lock() ABSL_UNLOCK_FUNCTION();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    const JobCore& core_;
  };
  // The lock for a section that may change the gate's answers.
  class ABSL_SCOPED_LOCKABLE Section {
   public:
    explicit Section(JobCore& core) ABSL_EXCLUSIVE_LOCK_FUNCTION(job_lock);
    ~Section() ABSL_UNLOCK_FUNCTION();
    Section(const Section&) = delete;
    Section& operator=(const Section&) = delete;

   private:
    JobCore& core_;
  };

  // Keeps the job alive while its own work is in progress.
  std::shared_ptr<const Job> KeepAlive() const { return job_.shared_from_this(); }

  using After = absl::AnyInvocable<void() &&>;
  // Runs after the section that has the lock.
  void RunAfter(After after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    after_.push_back(std::move(after));
  }
  // Calls `done` with the result, after the section.
  template <typename T>
  void Reply(Done<T> done, absl::StatusOr<T> result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    RunAfter([done = std::move(done), result = std::move(result)]() mutable {
      std::move(done)(std::move(result));
    });
  }
  // Asks the gate. `turn` is called under the lock, now or later, with OK or with the reason of a
  // refusal. The Pending cancels it while it waits. If the turn waits again, for another admission,
  // it leaves that one's number in `number` for the Pending.
  using Turn = absl::AnyInvocable<void(absl::Status) &&>;
  Pending Enter(Admission admission, int rank, Turn turn,
                std::shared_ptr<uint64_t> number = std::make_shared<uint64_t>(0));
  // Cancels the call whose gate number is then in `number`; 0: none.
  Pending PendingOf(std::shared_ptr<uint64_t> number);
  // As Enter, in a section.
  uint64_t EnterHere(Admission admission, int rank, Turn turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status StatusOf(std::optional<Answer> answer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status CheckUsable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A reader that read in place without the lock (Gate::StartReading) has ended.
  void StopReading();

  // A step has been committed, or the job closed.
  void NotifyStepOver() { step_over_.NotifyAll(); }
  void WaitForStepOver(std::chrono::steady_clock::time_point deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // For the log, after the section.
  void Tell(std::string text, int rank = -1) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    Tell(JobEvent{.job = spec().name, .rank = rank, .text = std::move(text)});
  }
  void Tell(JobEvent event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // In one line, now.
  void Warn(const std::string& line) const;
  std::shared_ptr<Progress> BeginActivity(ActivityKind kind, int64_t total_bytes,
                                          std::string directory = "") const;

  // The state changes, or a rank is taken: jobs derived earlier cannot replace this one.
  void Move() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A job is being derived from this one. Returns the number of moves so far.
  uint64_t Lend() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  uint64_t moves() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return moves_; }
  // The uids of the ancestors of a job derived from this one.
  std::vector<std::string> Ancestry() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // Self-synchronised.
  TraceRecorder trace;
  TrafficCounter traffic;
  JobHistory history;

  Gate gate ABSL_GUARDED_BY(job_lock);
  JobRecord record ABSL_GUARDED_BY(job_lock);
  FirstWeights first_weights ABSL_GUARDED_BY(job_lock);
  // By group, of the committed state; empty: unknown. Not kept for a later process.
  std::vector<StateBounds> bounds ABSL_GUARDED_BY(job_lock);

 private:
  const Job& job_;
  mutable Mutex mutex_;
  CondVar step_over_;
  std::vector<After> after_ ABSL_GUARDED_BY(job_lock);
  uint64_t moves_ ABSL_GUARDED_BY(job_lock) = 0;
  bool has_derived_ ABSL_GUARDED_BY(job_lock) = false;  // Since the last move.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_JOB_CORE_H_
