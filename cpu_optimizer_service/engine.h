// The jobs of one service process, the memory that they share, and the threads that update them.
//
//   Engine engine({.memory_limit_bytes = 64 << 30, .threads = 16});
//   absl::StatusOr<std::shared_ptr<Job>> job = engine.CreateJob(spec);
//
// Thread-safe. Outlives its jobs: all shared_ptrs to them, streams and snapshots end first.
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
  int threads = 0;                 // For updates; 0: as in TaskPool.
  // Gets a line about what makes this host slow, and about a broken job. Any thread; may be null.
  std::function<void(const std::string&)> warn;
  // Gets events in the life of jobs, and each decision. Any thread; may be null.
  std::function<void(const JobEvent&)> tell;
  // Outlive the engine; null: anonymous memory, the system's files.
  ArenaFactory* arenas = nullptr;
  // In it jobs outlive this process, and an earlier process's jobs are taken over (TakeOverJobs).
  // It outlives the engine. Null: jobs end with this process.
  NamedMemory* named_memory = nullptr;
  FileSystem* file_system = nullptr;
  // Where jobs are saved by name; it outlives the engine. Null: jobs are not saved.
  CheckpointDirectory* checkpoints = nullptr;
  // How long a lead that creates a job waits for other members until it reaches them, and they have
  // said whether they have room.
  double member_timeout_seconds = 30;
  // This process replaces an earlier one whose jobs are all in named memory. With false, the error
  // about an unknown job says that its unsaved steps are lost.
  bool goes_on = false;
};

// Connects the lead of a job to the other members, each in another process.
class MemberDialer {
 public:
  virtual ~MemberDialer() = default;
  // From now on keeps a link to each other member of this job: it sends Job::FollowOf first.
  virtual void Dial(std::shared_ptr<Job> job) = 0;
  // Ends the links, behind the words that are queued.
  virtual void HangUp(const Job& job) = 0;
};

// A job without parameters costs memory, too, which no limit counts.
inline constexpr size_t kMaxJobs = 1024;

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();  // Waits for running updates; detaches all streams.

  // ALREADY_EXISTS, INVALID_ARGUMENT, UNAVAILABLE while draining. RESOURCE_EXHAUSTED: kMaxJobs
  // exist, or there is too little memory; the message has needed, used and limit, and no memory was
  // allocated. Allocates and touches the job's memory on the caller's thread, which may take longer
  // than a caller waits. Meanwhile a call with the same description gets the first call's result,
  // and that call's thread calls its `done`. Later it is ALREADY_EXISTS.
  //
  // A job with members is created at its lead, on all members or none. RESOURCE_EXHAUSTED: the
  // message has what each member needs and has. UNAVAILABLE: a member cannot be reached.
  // UNIMPLEMENTED: such a job cannot be derived, nor skip lost steps or undo them.
  void CreateJob(JobSpec spec, Done<std::shared_ptr<Job>> done) {
    CreateJob(std::move(spec), {}, std::move(done));
  }
  // With a derivation the job continues from another job's state, or from a checkpoint's. A job
  // that replaces another one does so when it has all its first weights. Until then it is found
  // only by its uid, and both exist, with the memory of both. If the old job's state changes
  // earlier, or one of its ranks is taken, the new job is closed. Another derivation of the same
  // job replaces an unfinished one. NOT_FOUND: no job with that name and uid. FAILED_PRECONDITION:
  // it has a step in progress, or no weights; amsgrad differs; no parameter keeps its state.
  void CreateJob(JobSpec spec, Derivation derivation, Done<std::shared_ptr<Job>> done);
  absl::StatusOr<std::shared_ptr<Job>> CreateJob(JobSpec spec, Derivation derivation = {});
  // The lead's links, for all jobs that are led here. Null: none from now on; call it with that
  // before the dialer ends.
  void UseDialer(MemberDialer* dialer);
  // The lead of a job has opened a link to this member, for a part that is here or is to be created.
  // The destructor ends the link.
  class PartLink {
   public:
    virtual ~PartLink() = default;
    virtual void Hear(LeadWord word) = 0;
  };
  // `principal`: who the lead is; empty: unknown. UNAVAILABLE: the part is being created or closed,
  // or the service restarts; try again. PERMISSION_DENIED: another principal has created it. Other
  // errors go to the lead, by `sink`.
  absl::StatusOr<std::unique_ptr<PartLink>> FollowLead(const Follow& follow,
                                                       const std::string& principal,
                                                       std::shared_ptr<WordSink<MemberWord>> sink);
  // Takes over what an earlier process left in named memory. Call it first. State that cannot be
  // taken over is dropped. Of two jobs with one name, the one with the higher uid is dropped.
  // Returns lines for the log.
  struct TakenOver {
    std::vector<std::string> back;
    std::vector<std::string> lost;
    // Jobs without room. Their memory is unchanged: another process may try again.
    std::vector<std::string> left;
  };
  TakenOver TakeOverJobs();
  // NOT_FOUND; the message says how to continue from a saved job of that name, and what happened to
  // the one with this uid, if known. UNAVAILABLE: the job is being created (JOB_BEING_CREATED), or
  // the service restarts. NOT_FOUND (OTHER_JOB): the job has another uid than the given one. A job
  // that is to replace the one with the name is found by its uid.
  absl::StatusOr<std::shared_ptr<Job>> FindJob(const std::string& name,
                                               absl::string_view uid = {}) const;
  // The job that is, or was, derived from the one with this uid. NOT_FOUND, UNAVAILABLE as in
  // FindJob.
  absl::StatusOr<std::shared_ptr<Job>> FindDerived(const std::string& name,
                                                   absl::string_view from_uid) const;
  // By name. Without jobs that are to replace others.
  std::vector<std::shared_ptr<Job>> ListJobs() const;
  // Jobs without memory yet, by name. Only spec() and uid() may be called.
  std::vector<std::shared_ptr<const Job>> JobsBeingCreated() const;
  // Long work in progress, of all jobs and of the engine.
  std::vector<Activity> ListActivities() const;
  // NOT_FOUND. Waits for a decision and update in progress (pending.h); the short form on the
  // caller's thread. With members the lead closes it at all of them, and waits until each has
  // answered. FAILED_PRECONDITION (OTHER_MEMBER_LEADS): another one leads.
  Pending CloseJob(const std::string& name, Done<bool> done);
  absl::Status CloseJob(const std::string& name);
  // Only this job, whichever job has its name now. OK if it is closed already. `here`: only this
  // member's part, whoever leads; the other members keep theirs.
  Pending CloseJob(std::shared_ptr<Job> job, Done<bool> done, bool here = false);
  // The same for an unused job. FAILED_PRECONDITION, and the job stays, if it has a stream, it has
  // been used since `unused`, or the service drains.
  Pending CloseUnusedJob(std::shared_ptr<Job> job, const Job::Use& unused, Done<bool> done);

  // From now on BeginStep and CreateJob return UNAVAILABLE. Waits at most `seconds` until no job
  // has a step in progress that a worker could finish. True if no job has any step in progress.
  bool Drain(double seconds);
  // Accepts steps and jobs again, after a drain of a service that does not stop.
  void EndDrain();

  // The checkpoints in a folder, a single checkpoint, or, with an empty path, all folders of
  // `checkpoints`. On an engine's thread. NOT_FOUND. FAILED_PRECONDITION: an empty path without
  // `checkpoints`; more than kMostVerified to verify. RESOURCE_EXHAUSTED: too many such calls are
  // in progress, including cancelled ones on a hanging disk.
  struct LookRequest {
    std::string path;
    bool verified = false;  // Every byte is read.
    std::string job;        // For the Activity: their job, if known.
    // With an empty path: skips folders before this one, and stops after the folder with which
    // there are `enough`.
    std::string from_folder;
    size_t enough = std::numeric_limits<size_t>::max();
    // Skips folders for which this, if not null, returns false. It may be called after the call's
    // end.
    std::function<bool(absl::string_view folder)> wanted = nullptr;
  };
  static constexpr size_t kMostVerified = 4096;
  Pending LookForCheckpoints(LookRequest request, Done<std::vector<FoundCheckpoint>> done);
  // As DeleteCheckpoints; FAILED_PRECONDITION also while a save of this step is in progress in the
  // folder. Otherwise as LookForCheckpoints. When it is cancelled, the deletion in progress goes
  // on.
  struct DeleteRequest {
    std::string path;
    std::string uid;
  };
  Pending DeleteCheckpoints(DeleteRequest request, Done<std::vector<FoundCheckpoint>> done);

  // Another process is about to replace this one and continue its jobs, in named memory. Ends all
  // streams with UNAVAILABLE (RESTARTING); so does FindJob from now on.
  void SayFarewell();

  // Memory that a transport needs for a while. RESOURCE_EXHAUSTED. `what` names it: "job gpt2".
  absl::StatusOr<MemoryBudget::Reservation> Reserve(int64_t bytes, absl::string_view what);

  const std::string& instance_id() const;
  const MemoryBudget& memory() const;
  const TaskPool& tasks() const;
  const CheckpointDirectory* checkpoints() const;  // Nullable.
  NamedMemory* named_memory() const;               // Nullable.

 private:
  struct Impl;
  class Part;
  Pending Close(std::shared_ptr<Job> job, std::optional<Job::Use> unused, bool here,
                Done<bool> done);

  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_ENGINE_H_
