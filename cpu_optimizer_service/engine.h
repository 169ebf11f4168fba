// The jobs of one service process, the memory that they share, and the threads that update them.
//
//   Engine engine({.memory_limit_bytes = 64 << 30, .threads = 16});
//   absl::StatusOr<std::shared_ptr<Job>> job = engine.CreateJob(spec);
//
// Thread-safe. Outlives its jobs: everyone gives up their shared_ptr, streams and snapshots first.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_ENGINE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "cpu_optimizer_service/job/job.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {

struct EngineOptions {
  int64_t memory_limit_bytes = 0;  // Required.
  int threads = 0;                 // For updates; 0: as of TaskPool.
  // Told, in a line, what makes this host slow, and of a broken job. Any thread; may be null.
  std::function<void(const std::string&)> warn;
  // Told what happens in the life of a job, not with each step. Any thread; may be null.
  std::function<void(const JobEvent&)> tell;
  // Outlive the engine; null: anonymous memory, the system's files.
  ArenaFactory* arenas = nullptr;
  // In which jobs outlive this process, and from which those of an earlier one are taken over
  // (TakeOverJobs); outlives the engine. Null: they die with it.
  NamedMemory* named_memory = nullptr;
  FileSystem* file_system = nullptr;
  // Where jobs are saved by name, which outlives the engine too; null: nowhere.
  CheckpointDirectory* checkpoints = nullptr;
  // In the place of an earlier process, of which named memory has all jobs. Otherwise it is said of
  // a job that this process never had, that what was not saved of it is lost.
  bool goes_on = false;
};

// A job of no parameters costs memory too, that no limit counts.
inline constexpr size_t kMaxJobs = 1024;

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();  // Waits for running updates; detaches all streams.

  // ALREADY_EXISTS, INVALID_ARGUMENT, RESOURCE_EXHAUSTED (kMaxJobs exist; or with needed, used and
  // limit, before anything is allocated), UNAVAILABLE while draining. Allocates and touches the
  // job's memory on the caller's thread. Asked for again with the same description while that goes
  // on, which may take longer than a caller waits, it says what the first one says, and `done` is
  // called by that one's thread; later it is ALREADY_EXISTS.
  void CreateJob(JobSpec spec, Done<std::shared_ptr<Job>> done) {
    CreateJob(std::move(spec), {}, std::move(done));
  }
  // With a derivation the job goes on from another one's state, or from a checkpoint's. One that takes
  // another one's place does so when it has all its first weights, and is found by its uid alone until
  // then. Both are there meanwhile, with the memory of both. If the old one gets another state, or a
  // rank of it is taken, before, the new one is closed. Another derivation of the same job takes the
  // place of one that has not come to its end.
  // NOT_FOUND: no job of that name and uid. FAILED_PRECONDITION: it has a step in progress, or no
  // weights; amsgrad differs; no parameter keeps anything.
  void CreateJob(JobSpec spec, Derivation derivation, Done<std::shared_ptr<Job>> done);
  absl::StatusOr<std::shared_ptr<Job>> CreateJob(JobSpec spec, Derivation derivation = {});
  // Takes over what an earlier process left in named memory, before anything else is called. What
  // cannot be taken over is forgotten; so is, of two jobs of one name, the one with the higher uid.
  // Lines for the log.
  struct TakenOver {
    std::vector<std::string> back;
    std::vector<std::string> lost;
    // There was no room for them. Their memory is as it was: another process may try again.
    std::vector<std::string> left;
  };
  TakenOver TakeOverJobs();
  // NOT_FOUND, which says how a job of that name goes on that was saved, and what became of the one
  // with this uid, as far as it is known. UNAVAILABLE: it is being created
  // (JOB_BEING_CREATED), or the service restarts. NOT_FOUND (OTHER_JOB): the job has another uid than
  // that which is given; so it is found that is to take the place of the one of the name.
  absl::StatusOr<std::shared_ptr<Job>> FindJob(const std::string& name,
                                               absl::string_view uid = {}) const;
  // The job that is, or was, derived from the one of this uid. NOT_FOUND, UNAVAILABLE as FindJob.
  absl::StatusOr<std::shared_ptr<Job>> FindDerived(const std::string& name,
                                                   absl::string_view from_uid) const;
  // By name. Those that are to take another one's place are not among them.
  std::vector<std::shared_ptr<Job>> ListJobs() const;
  // Those that have no memory yet, by name. They can be asked for spec() and uid(), and nothing else.
  std::vector<std::shared_ptr<const Job>> JobsBeingCreated() const;
  // Long work that is under way, of all jobs and of none.
  std::vector<Activity> ListActivities() const;
  // NOT_FOUND. Waits for a decision and update under way (pending.h); the short form on the
  // caller's thread.
  Pending CloseJob(const std::string& name, Done<bool> done);
  absl::Status CloseJob(const std::string& name);
  // This job alone, whichever has its name by now. OK if it is closed already.
  Pending CloseJob(std::shared_ptr<Job> job, Done<bool> done);
  // The same of a job that nobody uses: FAILED_PRECONDITION, and nothing is closed, if it has a
  // stream, it has been used since it was like `unused`, or the service drains.
  Pending CloseUnusedJob(std::shared_ptr<Job> job, const Job::Use& unused, Done<bool> done);

  // From now on BeginStep and CreateJob say UNAVAILABLE. Waits until no job has a step in progress
  // that somebody is there to finish, at most `seconds`; true if no job has any step in progress.
  bool Drain(double seconds);
  // Takes steps and jobs again, after a drain whose service does not stop.
  void EndDrain();

  // What is saved in a folder of checkpoints, in a checkpoint, or, with an empty path, in all folders
  // of `checkpoints`. On a thread of the engine's. NOT_FOUND. FAILED_PRECONDITION: an empty path
  // without `checkpoints`; more than kMostVerified are to be verified. RESOURCE_EXHAUSTED: a few such
  // calls are under way, those among them that have been cancelled on a disk that hangs.
  struct LookRequest {
    std::string path;
    bool verified = false;  // Every byte is read.
    std::string job;        // Whose they are, as far as is known: of the Activity.
    // With an empty path: folders before this one are left out, and those after the one with which
    // there are `enough`.
    std::string from_folder;
    size_t enough = std::numeric_limits<size_t>::max();
    // And those of which this, if it is not null, says false; it may be asked after the call's end.
    std::function<bool(absl::string_view folder)> wanted = nullptr;
  };
  static constexpr size_t kMostVerified = 4096;
  Pending LookForCheckpoints(LookRequest request, Done<std::vector<FoundCheckpoint>> done);
  // As DeleteCheckpoints; FAILED_PRECONDITION also where a save of this step is under way in the
  // folder. Otherwise as LookForCheckpoints; what has begun goes on when it is cancelled.
  struct DeleteRequest {
    std::string path;
    std::string uid;
  };
  Pending DeleteCheckpoints(DeleteRequest request, Done<std::vector<FoundCheckpoint>> done);

  // Another process is about to take this one's place and go on with its jobs, in named memory: ends
  // all streams with UNAVAILABLE (RESTARTING), and so FindJob from now on, and does nothing else.
  void SayFarewell();

  // Room for what a transport needs for a while. RESOURCE_EXHAUSTED. `what` names it: "job gpt2".
  absl::StatusOr<MemoryBudget::Reservation> Reserve(int64_t bytes, absl::string_view what);

  const std::string& instance_id() const;
  const MemoryBudget& memory() const;
  const TaskPool& tasks() const;
  const CheckpointDirectory* checkpoints() const;  // Nullable.
  NamedMemory* named_memory() const;               // Nullable.

 private:
  struct Impl;
  Pending Close(std::shared_ptr<Job> job, std::optional<Job::Use> unused, Done<bool> done);

  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_ENGINE_H_
