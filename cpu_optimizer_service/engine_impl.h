// An engine's parts: its budget, threads and jobs.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_ENGINE_IMPL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_ENGINE_IMPL_H_

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/checkpoint_calls.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"
#include "cpu_optimizer_service/past_jobs.h"

namespace ballast {

// Concurrent saves and loads, and planes saved at once beside steps; further ones queue. A hanging
// disk blocks only these threads.
inline constexpr size_t kDiskThreads = 16;

inline std::string MakeInstanceId() {
  std::random_device random;
  return absl::StrCat(absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
}

struct Engine::Impl {
  explicit Impl(const EngineOptions& options)
      : goes_on(options.goes_on),
        member_timeout(options.member_timeout_seconds),
        budget(options.memory_limit_bytes),
        own_arenas(MakeAnonymousArenaFactory(&tasks, options.warn)),
        environment{.budget = &budget,
                    .tasks = &tasks,
                    .disk_threads = &disk_threads,
                    .saving_threads = &saving_threads,
                    .writing_threads = &writing_threads,
                    .arenas = options.arenas != nullptr ? options.arenas : own_arenas.get(),
                    .file_system =
                        options.file_system != nullptr ? options.file_system : &PosixFileSystem(),
                    .checkpoints = options.checkpoints,
                    .checkpoint_uses = &checkpoint_uses,
                    .draining = &draining,
                    .warn = options.warn,
                    .tell = options.tell,
                    .activities = &activities,
                    .named_memory = options.named_memory,
                    .take_place =
                        [this](std::shared_ptr<JobImpl> derived) {
                          TakePlace(std::move(derived), [](const absl::Status&) {});
                        },
                    .moved = [this](const Job& origin) { GiveUpSuccessorOf(origin); }},
        tasks(options.threads) {
    if (options.named_memory != nullptr) options.named_memory->UseTasks(&tasks);
  }
  ~Impl() {
    // It outlives the tasks.
    if (environment.named_memory != nullptr) environment.named_memory->UseTasks(nullptr);
  }

  // For the message about an unknown job.
  std::string WhatBecameOf(const std::string& name, absl::string_view uid) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // "; go on from ...", of the job with that uid.
  std::string LastCheckpointOf(const std::string& uid) const {
    if (environment.checkpoints != nullptr) return environment.checkpoints->LastOf(uid);
    return "; resume from a checkpoint";
  }

  using Clock = std::chrono::steady_clock;
  const bool goes_on;
  const std::chrono::duration<double> member_timeout;
  const std::string instance_id = MakeInstanceId();
  Activities activities;
  CheckpointUses checkpoint_uses;
  MemoryBudget budget;
  // Ends after the last task, which may still request memory, and until then only keeps the address
  // of `tasks`.
  std::unique_ptr<ArenaFactory> own_arenas;
  std::atomic<bool> draining = false;
  std::atomic<bool> restarting = false;
  // Both outlive the threads, which use them.
  const JobEnvironment environment;
  CheckpointCalls checkpoint_calls{environment};
  TaskPool tasks;
  // They end in the reverse order. A saving thread waits for parts from writing threads, and would
  // wait forever if those ended first. Work on all three may still start tasks.
  HelperThreads writing_threads{kDiskThreads, HelperThreads::Priority::kLowest};
  HelperThreads saving_threads{kDiskThreads};
  HelperThreads disk_threads{kDiskThreads};
  struct Entry {
    std::shared_ptr<JobImpl> job;
    bool ready = false;  // It has its memory.
    // For a successor: its replacement of the origin is being decided. Meanwhile no other thread
    // may give it up.
    bool takes_place = false;
    // Until then: other callers who want it.
    std::vector<Done<std::shared_ptr<Job>>> waiting;
  };
  // Enters a job that is not ready, or returns why not. If a job with the same description is being
  // created, that one keeps `done`.
  enum class Entered : uint8_t { kIsNew, kWaits };
  absl::StatusOr<Entered> Enter(const std::shared_ptr<JobImpl>& job,
                                Done<std::shared_ptr<Job>>& done);
  static bool IsSame(const JobImpl& one, const JobImpl& other) {
    return one.derivation() == other.derivation() &&
           FirstDifference(one.spec(), other.spec()).empty();
  }
  absl::Status OtherJob(const Job& job, absl::string_view uid) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // The job that `job` is to replace; may be null.
  absl::StatusOr<std::shared_ptr<JobImpl>> OriginOf(const JobImpl& job) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // A job with all its first weights replaces its origin, or is closed.
  void TakePlace(std::shared_ptr<JobImpl> derived,
                 absl::AnyInvocable<void(const absl::Status&)> done);
  // A derived job is given up. The caller closes it.
  std::shared_ptr<JobImpl> TakeSuccessor(const std::string& name, const char* how)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  static void CloseQuietly(const std::shared_ptr<JobImpl>& job) {
    if (job != nullptr) job->Close(std::nullopt, /*here=*/true, [](const absl::StatusOr<bool>&) {});
  }
  // The job has advanced without it.
  void GiveUpSuccessorOf(const Job& origin);
  // At the lead of others, on the caller's thread.
  absl::Status CreateOverMembers(const std::shared_ptr<JobImpl>& job);
  void HangUp(const JobImpl& job);
  // Of a job that is not ready: gives its name free, and tells whoever waits for it.
  void Leave(const Job& job, const absl::Status& why);
  // All jobs that are ready.
  std::vector<std::shared_ptr<JobImpl>> AllJobs() const;
  // Its caller may have gone, so the log gets it, too.
  void TellOfCreation(const Job& job, const absl::Status& status, Clock::duration took) const;

  // Is told once.
  class Caller {
   public:
    explicit Caller(Done<bool> done) : done_(std::move(done)) {}
    void Tell(absl::StatusOr<bool> result) {
      Done<bool> done;
      {
        MutexLock lock(mutex_);
        std::swap(done, done_);
      }
      if (done) std::move(done)(std::move(result));
    }

   private:
    Mutex mutex_;
    Done<bool> done_ ABSL_GUARDED_BY(mutex_);
  };
  // Parts of jobs that are made or closed on threads, which use the rest of this.
  class UnderWay {
   public:
    void Begin() {
      MutexLock lock(mutex_);
      ++count_;
    }
    void End() {
      MutexLock lock(mutex_);
      --count_;
      ended_.NotifyAll();
    }
    void Await() {
      MutexLock lock(mutex_);
      while (count_ > 0) ended_.Wait(mutex_);
    }

   private:
    Mutex mutex_;
    CondVar ended_;
    int count_ ABSL_GUARDED_BY(mutex_) = 0;
  };
  UnderWay parts_under_way;
  mutable Mutex mutex;
  MemberDialer* dialer ABSL_GUARDED_BY(mutex) = nullptr;
  std::map<std::string, Entry> jobs ABSL_GUARDED_BY(mutex);
  // Jobs that are to replace the ready job of the same name.
  std::map<std::string, Entry> successors ABSL_GUARDED_BY(mutex);
  PastJobs past ABSL_GUARDED_BY(mutex);
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_ENGINE_IMPL_H_
