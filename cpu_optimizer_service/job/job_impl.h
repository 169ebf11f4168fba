// Job as it is built: the gate says what may happen, the parts below have the state, and the
// functions here put them together. They are spread by subject:
//
//   job_impl.cc           creation, control
//   job_status.cc         the picture that others are shown
//   job_first_weights.cc  first weights
//   job_ranks.cc          attaching, streams, memory that ranks share
//   job_generation.cc     steps that are given up, generations
//   job_step.cc           what a rank says of a step, up to the last seal
//   job_contribution.cc   the gradients that it gives
//   job_speculation.cc    provisional updates
//   job_decision.cc       from the last seal to the commit
//   job_state.cc          looking at state, timelines
//   job_load.cc           loading, undoing
//   job_derive.cc         going on from another job, or a checkpoint, with other parameters
//   job_write.cc          writes of state between steps
//   job_save.cc           saving
//   job_recover.cc        what outlives this process, and taking over what an earlier one left
//
// One mutex guards all that the ranks say; arithmetic, listeners, disks and unmapping happen
// outside it. Code that changes what the gate answers takes the mutex by a Section: when that ends,
// calls that waited get their turn, and then what they and the section left for afterwards runs
// without the lock.
//
// Where memory runs out in the middle of it, in a stream's call, a task or what a section left, the
// job is broken (Break): nothing of it can be relied on but what is read as it was committed.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_IMPL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_IMPL_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cpu_optimizer_service/common/system/helper_threads.h"
#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/gradients/gradient_store.h"
#include "cpu_optimizer_service/gradients/ledger.h"
#include "cpu_optimizer_service/gradients/norm_sums.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "cpu_optimizer_service/host/task_queue.h"
#include "cpu_optimizer_service/job/gate.h"
#include "cpu_optimizer_service/job/job.h"
#include "cpu_optimizer_service/job/job_record.h"
#include "cpu_optimizer_service/job/kept_job.h"
#include "cpu_optimizer_service/job/rank_table.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"
#include "cpu_optimizer_service/job/step/seal_check.h"
#include "cpu_optimizer_service/job/step/speculation.h"
#include "cpu_optimizer_service/job/step/step.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "cpu_optimizer_service/job/stream_calls.h"
#include "cpu_optimizer_service/job/traffic_counter.h"
#include "cpu_optimizer_service/state/checkpoint.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "cpu_optimizer_service/state/checkpoint_writer.h"
#include "cpu_optimizer_service/state/chunk_store.h"
#include "cpu_optimizer_service/state/save_schedule.h"

namespace ballast {

class JobImpl;

// What a job shares with the others of its engine, all outliving it.
struct JobEnvironment {
  MemoryBudget* budget = nullptr;
  TaskPool* tasks = nullptr;              // Arithmetic.
  HelperThreads* disk_threads = nullptr;  // Loading, and saving what holds steps back.
  // Saving beside steps: threads that begin, wait and end, and those of the lowest priority that
  // write for them. The first end before the second.
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
  NamedMemory* named_memory = nullptr;  // Nullable: jobs die with this process.
  // Told that the last first weights of a job have come that is to take another one's place.
  std::function<void(std::shared_ptr<JobImpl>)> take_place;
  // Told that a job from which another one is derived has moved on.
  std::function<void(std::shared_ptr<JobImpl>)> moved;
};

class JobImpl : public Job {
 public:
  // A job without its memory: INVALID_ARGUMENT says why there can be none. Nothing is called but
  // spec(), uid(), derivation() and layout() before Allocate. `is_there`: it has its memory, whatever
  // the limit is.
  static absl::StatusOr<std::shared_ptr<JobImpl>> Describe(JobIdentity identity,
                                                           const JobEnvironment& environment,
                                                           bool is_there = false);
  // `origin`: the job that it is derived from; null: none, or from a checkpoint.
  absl::Status Allocate(JobImpl* origin = nullptr);
  // The job that an earlier process left in named memory under this uid, ready, with a decided step
  // rolled forward. NOT_FOUND: it had not got so far as to create it. Other errors: it cannot be
  // taken over, in one line. `story` gets what is to be told of it.
  static absl::StatusOr<std::shared_ptr<JobImpl>> TakeOver(const std::string& uid,
                                                           const JobEnvironment& environment,
                                                           std::string& story);

  using Job::AbortStep;
  using Job::Attach;
  using Job::Load;
  using Job::OpenStream;
  using Job::Save;
  using Job::TakeSnapshot;
  using Job::UndoStep;

  const JobSpec& spec() const override { return identity_.spec; }
  const Layout& layout() const override { return layout_; }
  const std::string& uid() const override { return identity_.uid; }
  const Derivation& derivation() const override { return identity_.derivation; }
  JobStatus Status() const override;
  HistoryView History(const HistoryQuery& query) const override { return history_.Read(query); }
  Attachment Position() const override;
  Pending Attach(AttachRequest request, Done<Attachment> done) override;
  Pending OpenStream(OpenStreamRequest request, std::shared_ptr<RankListener> listener,
                     Done<std::unique_ptr<RankStream>> done) override;
  absl::StatusOr<Uploader> BeginFirstWeights(const RankHolder& holder, FirstState state) override;
  absl::StatusOr<bool> WriteInitialWeights(int64_t chunk,
                                           absl::Span<const absl::Span<const std::byte>> payload,
                                           const std::optional<Uploader>& uploader) override;
  absl::StatusOr<StateWriter> BeginStateWrite(const RankHolder& holder, StateWrite write) override;
  absl::Status WriteStateChunk(const StateWriter& writer, int64_t chunk,
                               absl::Span<const absl::Span<const std::byte>> payload) override;
  Pending EndStateWrite(const StateWriter& writer, Done<bool> done) override;
  void DropStateWrite(const StateWriter& writer) override;
  absl::StatusOr<std::unique_ptr<StateWriting>> PrepareStateWrite(StateWrite write) override;
  Pending CommitStateWrite(std::shared_ptr<StateWriting> writing, Done<uint64_t> done) override;
  absl::Status ReadShard(Generation generation, uint64_t step, int chunk,
                         absl::Span<std::byte> out) override;
  void TellWaiting() override;
  std::optional<double> SecondsSinceFirstSeal() const override;
  Pending AbortStep(Done<uint64_t> done) override;
  Pending UndoStep(UndoRequest request, Done<uint64_t> done) override;
  absl::StatusOr<HyperParameters> UpdateGroup(int group,
                                              const HyperParameterOverrides& changes) override;
  Pending TakeSnapshot(std::vector<int> parameters, Done<Snapshot> done) override;
  Pending Save(SaveRequest request, Done<CheckpointInfo> done) override;
  Pending Load(LoadRequest request, Done<CheckpointInfo> done) override;
  std::string StateHash() override;
  absl::StatusOr<MemoryBudget::Reservation> ReserveRankMemory(int rank) override;
  absl::Status GiveRankMemory(const RankHolder& holder,
                              std::shared_ptr<const RankMemory> memory) override;
  void DropRankMemory(int rank, const RankMemory* memory) override;
  absl::StatusOr<Trace> TraceSteps(uint32_t steps,
                                   const std::function<bool()>& still_wanted) override;
  TraceRecorder& trace() override { return trace_; }
  Use use() const override;

  // No step has begun or is being decided.
  bool IsBetweenSteps() const;
  // A step has begun that no rank with a stream is there to finish.
  bool IsAbandoned() const;
  // Ends all streams with this, as their transport would if it broke.
  void TellStreams(const absl::Status& why);
  // Waits for a running update, then clears the step and detaches all streams. Closing again is OK.
  // With `unused`: FAILED_PRECONDITION if it has been used since it was like that, or has a stream.
  Pending Close(std::optional<Use> unused, Done<bool> done);
  // Closes this job, and makes `derived` the one that goes on, in that order for a later process.
  // False, and nothing is changed: it has not all its weights any more. FAILED_PRECONDITION: this job
  // has gone on since, or has a step in progress.
  Pending GiveWayTo(std::shared_ptr<JobImpl> derived, Done<bool> done);
  bool has_all_first_weights() const {
    MutexLock lock(mutex_);
    return first_weights_.missing() == 0;
  }

 private:
  class Stream;
  using After = absl::AnyInvocable<void() &&>;

  // The lock of a section that may change what the gate answers; see above.
  class ABSL_SCOPED_LOCKABLE Section {
   public:
    explicit Section(JobImpl& job) ABSL_EXCLUSIVE_LOCK_FUNCTION(job.mutex_);
    ~Section() ABSL_UNLOCK_FUNCTION();
    Section(const Section&) = delete;
    Section& operator=(const Section&) = delete;

   private:
    JobImpl& job_;
  };

  // All that follows from a decision, so that it runs without the lock.
  struct UpdatePlan {
    StepOutcome outcome;
    StepTerms terms;
    StepVote vote;
    uint32_t micro_steps = 0;
    bool coverage_complete = false;
    StepUpdate update;
    Listeners listeners;            // By rank. Nullable.
    RankMemories weights_in_place;  // By rank: where its weights are written. Nullable.
    Speculation::Settled speculation;
  };

  JobImpl(JobIdentity identity, Layout layout, const JobEnvironment& environment);
  std::shared_ptr<Progress> BeginActivity(ActivityKind kind, int64_t total_bytes,
                                          std::string directory = "") const {
    return environment_.activities->Begin({.kind = kind,
                                           .job = spec().name,
                                           .directory = std::move(directory),
                                           .total_bytes = total_bytes});
  }
  std::shared_ptr<JobImpl> Self() { return std::static_pointer_cast<JobImpl>(shared_from_this()); }

  // ---- job_impl.cc
  // Runs a part of the job's work; breaks it if there is no memory for that.
  template <typename Work>
  void Guarded(Work&& work) noexcept {
    if (!RunsInMemory(std::forward<Work>(work))) Break();
  }
  // The same for a stream's call, which has an answer.
  template <typename Call>
  auto Answered(Call&& call) -> decltype(std::forward<Call>(call)());
  // The job does no more: its streams end with broken_, and so do calls that wait or come. Needs no
  // memory itself.
  void Break() noexcept ABSL_LOCKS_EXCLUDED(mutex_);
  bool broken() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return gate_.state().broken; }
  // For others: while first weights are awaited none is, whichever they begin at. Of a derived job it
  // is known from the start.
  uint64_t committed_step() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return first_weights_.complete() || !inherited_.empty() ? record_.committed_step : 0;
  }
  Attachment PositionNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Use UseNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckUnused(const Use& unused) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A task of the job's own; guarded.
  void StartTask(std::function<void()> work, int node = TaskPool::kAnyNode);
  // What need_ says: its share of the budget, then the memory.
  absl::Status AllocateParts();
  // This job ends, whose listeners are told `why`.
  void CloseNow(const std::string& why, Done<bool> done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs when the section that has the lock has ended.
  void RunAfter(After after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    after_.push_back(std::move(after));
  }
  // Calls `done` with the result, after the section.
  template <typename T>
  void Reply(Done<T> done, absl::StatusOr<T> result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    RunAfter([done = std::move(done), result = std::move(result)]() mutable {
      std::move(done)(std::move(result));
    });
  }
  // Asks the gate. `turn` is called under the lock, now or later, with OK or with why it was
  // refused. The Pending cancels it while it waits. A turn that waits once more, for another
  // admission, leaves that one's number in `number` for the Pending.
  using Turn = absl::AnyInvocable<void(absl::Status) &&>;
  Pending Enter(Admission admission, int rank, Turn turn,
                std::shared_ptr<uint64_t> number = std::make_shared<uint64_t>(0))
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Cancels the call whose number in the gate `number` has by then; 0: none.
  Pending PendingOf(std::shared_ptr<uint64_t> number);
  // As Enter, in a section.
  uint64_t EnterHere(Admission admission, int rank, Turn turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // For the log, after the section.
  void Tell(std::string text, int rank = -1) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status StatusOf(std::optional<Answer> answer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckUsable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- job_first_weights.cc
  // Of a plane of a chunk that has come: that all of it may be first weights.
  absl::Status CheckFirst(int index, Plane plane, absl::Span<const float> values) const;
  // Shows how far they are, after any of them has come or was forgotten.
  void ShowFirstWeights() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompleteFirstWeights() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- job_derive.cc. The first ones before anybody else knows the job.
  using ReadPlane = std::function<absl::Status(const std::string& parameter, Plane plane,
                                               int64_t offset, absl::Span<float> out)>;
  // Its own state, while it reads (StopReading).
  struct Lent {
    CheckpointIndex index;
    StepHistory history;
    SaveSchedule save_schedule;
    std::string resumed_uid;
    std::vector<std::string> ancestors;
    uint64_t moves = 0;
  };
  // Of a job that is derived from this one.
  std::vector<std::string> Ancestry() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The state changes, or a rank is taken: no job that was derived before can take the place.
  void Move() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Lent> Lend();
  absl::Status Inherit(JobImpl& origin);
  absl::Status InheritCheckpoint(const std::string& path, JobImpl* origin);
  absl::Status Inherit(const CheckpointIndex& index, const ReadPlane& read);
  absl::Status ChooseInherited(const CheckpointIndex& index);
  absl::Status InheritChunk(int chunk, const ReadPlane& read);
  // A plane of a chunk that has come, except what is inherited.
  void WriteFirst(int chunk, Plane plane, absl::Span<const float> values);
  // Of the origin.
  absl::Status CheckMayDerive() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  enum class Succession : uint8_t { kDone, kMissing, kMoved };
  Succession TakePlace(uint64_t origin_moves);

  // ---- job_write.cc
  absl::Status CheckMayWrite(int rank, const StateWrite& write) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Before a rank begins a step: that ranks write nothing before it.
  absl::Status CheckWritesEnded(int rank, uint64_t step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the rank has brought of a write counts no more.
  void DropPart(int rank, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteNow(const StateWriting& writing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CopyWritten(const StateWriting& writing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeOverWrite(std::string& story) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- job_ranks.cc
  absl::Status CheckGeneration(const Generation& generation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCurrent(const StreamKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckHolder(int rank, const std::string& process_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckAttachRequest(const AttachRequest& request) const;
  absl::Status CheckMayAttach(const AttachRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckMayOpen(const OpenStreamRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AttachNow(const AttachRequest& request, Done<Attachment> done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::unique_ptr<RankStream>> OpenNow(const OpenStreamRequest& request,
                                                      std::shared_ptr<RankListener> listener)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseStream(const StreamKey& key, const std::string& why);
  // Whether the rank has a part in the step in progress.
  bool HasBegun(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  RankPosition PositionOf(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the ranks have given the step in progress, while they can still take it back: it is open,
  // or sealed. Null: there is none.
  const OpenStep* Undecided() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t RankMemoryBytes(int rank) const;

  // ---- job_generation.cc
  // Clears the undecided step and frees all ranks, which share no memory with us any more; tells
  // their listeners `reason`. `then` runs under the lock once all of it is cleared, before any
  // other call's turn.
  void RaiseGeneration(std::string reason, absl::AnyInvocable<void() &&> then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the rank has brought of first weights, or of a write of state, is to be sent again.
  void ForgetUploads(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The step in progress cannot be kept. Decides it as a skip, because of `why`, if the job is to
  // (OnAbort) and all ranks have begun it; raises the generation otherwise. `then` is as above.
  void GiveUpStep(const std::string& why, absl::AnyInvocable<void() &&> then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MaySkipStep() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SkipStep(const std::string& why, absl::AnyInvocable<void() &&> then)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the step was skipped because it could not be kept, and the rank may not know yet: what
  // comes late for it is dropped.
  bool WasGivenUp(uint64_t step, int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What SkipStep decides.
  static KeptDecision SkipOf(const OpenStep& given, absl::string_view why);
  void FinishClearing() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets all that was given; the job is between steps.
  void ClearStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After the section: listeners are told the reason, then memories are unmapped.
  void Detach(Detached detached, absl::Status reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- job_step.cc
  absl::Status BeginStep(const StreamKey& key, StepAttempt at, const StepSettings& settings);
  absl::Status EndMicroStep(const StreamKey& key, StepAttempt at, uint32_t micro_step,
                            UsedParameters used);
  absl::StatusOr<std::optional<SealRefusal>> Seal(const StreamKey& key, StepAttempt at,
                                                  uint32_t micro_steps,
                                                  const std::optional<StepVote>& vote);
  absl::Status Report(const StreamKey& key, StepAttempt at, const RankReport& report);
  absl::Status Vote(const StreamKey& key, StepAttempt at, const StepVote& vote);
  // The step is sealed and its norm known. The last vote begins the decision, or voids all votes.
  absl::Status TakeVote(SealedStep& sealed, int rank, const StepVote& vote)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of a seal that is said again, by a stream that may have missed the norm.
  absl::Status RepeatSeal(int rank, const std::optional<StepVote>& vote)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // If votes differ: voids them, tells all ranks, and returns false.
  bool CheckVotes(SealedStep& sealed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Pending Discard(const StreamKey& key, StepAttempt at, Done<bool> done);
  absl::StatusOr<bool> DiscardNow(const StreamKey& key, StepAttempt at)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // No step is open, and `step` is the next: opens it, unless the service is stopping.
  absl::Status OpenNextStep(uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // FAILED_PRECONDITION if `step`, which the rank begins or discards (`does`), is not the one that
  // is open or may be opened.
  absl::Status CheckIsNext(int rank, absl::string_view does, uint64_t step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The rank's attempt at the open step is this one. FAILED_PRECONDITION also if the rank has
  // discarded it.
  absl::Status CheckInAttempt(const OpenStep& open, int rank, uint32_t attempt) const;
  absl::StatusOr<StepTerms> MakeTerms(uint64_t step, const StepSettings& settings) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<OpenStep*> FindOpenStep(uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `end` counts the micro-steps up to one that `what` names.
  absl::Status CheckMicroSteps(absl::string_view what, int64_t end) const;
  bool HasAcceptedSeal(uint64_t step, uint32_t micro_steps) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  StepGiven Given(const OpenStep& open) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return {identity_.spec, layout_, ledger_, open};
  }

  // ---- job_contribution.cc
  Pending StopProvisional(const StreamKey& key, StepAttempt at, uint32_t micro_step_begin,
                          absl::Span<const int64_t> chunks, Done<bool> done);
  // Of these chunks, as StopProvisional has them.
  void SupersedeUpdates(int rank, StepAttempt at, uint32_t micro_step_begin,
                        absl::Span<const int64_t> chunks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<ContributionResult> Contribute(const StreamKey& key, const Contribution& given);
  absl::Status CheckContribution(int rank, const Contribution& given) const;
  // A contribution that the ledger wants: what is still to be done with it, outside the lock.
  struct Accepted {
    // kRepeat, kDiscarded: nothing.
    ContributionResult result = ContributionResult::kAdded;
    bool borrowed = false;                     // It is in its place; only its sums are wanted.
    std::shared_ptr<const RankMemory> memory;  // Where it lies, if in place.
    std::shared_ptr<const StepUpdate> provisional;
    uint64_t ticket = 0;
    uint64_t epoch = 0;  // For KeepContribution.
  };
  absl::StatusOr<Accepted> Accept(const StreamKey& key, const Contribution& given)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddToGradient(const Contribution& given, const RankMemory* memory, SumLane* lane);
  // Computes the chunk's sums; returns about what they add to the squared norm, unscaled and
  // divided. Only provisional updates depend on that.
  double ComputeSums(uint64_t step, int chunk, const StepUpdate* provisional);
  // Has the sums of a chunk computed by a task, unless the ticket is void by then.
  void StartSums(uint64_t step, int chunk, uint64_t ticket);
  void RunSums(uint64_t step, int chunk, uint64_t ticket);
  // What is queued for the rank's chunks is void.
  void VoidTickets(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { ++tickets_[rank]; }
  void VoidAllTickets() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (int rank = 0; rank < ranks_.size(); ++rank) VoidTickets(rank);
  }
  // Tasks of one chunk run near its memory.
  void StartOfChunk(int chunk, std::function<void()> task);

  // ---- job_decision.cc
  void StartDecisionIfDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On a thread of the engine's: finishes the chunks' sums, and waits in the gate for what else is
  // being computed.
  void RunDecision();
  void DecideWhenComputed();
  // Then, with nothing else under way: sums what chunks share, and decides.
  void CombineAndDecide();
  // The sums are known: decides, or has the ranks vote.
  void DecideOrAwaitVotes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What is to be decided, while it can still become a skip.
  struct Draft : DecidedUpdate {
    std::vector<StateBounds> bounds;  // By group, of the state that the update leaves.
  };
  Draft MakeDraft(const SealedStep& sealed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // To these ranks, after the section.
  void TellNorm(const SealedStep& sealed, absl::Span<const int> ranks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Names the first element of a sealed step's gradient that is not finite; empty: all are.
  std::string FirstNonFinite(const SealedStep& sealed) const;
  // P10: computes, without the lock and without a trace of it, the update of the groups of which
  // the bounds do not tell that their state stays finite. The draft has their bounds then, or is a
  // skip.
  void TryUpdate(Draft& draft);
  std::string DescribeOverflow(const Draft& draft, const ChunkPiece& piece,
                               const TrialUpdate::NonFinite& found) const;
  // Computes the draft's trial, if it needs one, then waits in the gate once more and decides.
  void DecideOrTry(Draft draft) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  UpdatePlan Decide(Draft draft) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CarryOut(UpdatePlan plan);
  // Of the chunk in state `from`; what is written, and where, is left to the caller.
  ChunkUpdate UpdateOf(const StepUpdate& update, int chunk, const Slot& from) const;
  void UpdateTo(const StepUpdate& update, int chunk, const ChunkStore::Write& write,
                const WeightBuffer& weights, RedoLane* redo = nullptr);
  int64_t WeightBytes(int chunk) const;
  void CountWeights(int chunk, const WeightBuffer& weights) {
    traffic_.CountWeights(WeightBytes(chunk), weights.in_place());
  }
  WeightBuffer BufferFor(const UpdatePlan& plan, int chunk, bool gradient_may_go);
  void CarryOutChunk(const UpdatePlan& plan, int chunk);
  void ApplyToChunk(const UpdatePlan& plan, int chunk);
  void SendPublishedWeights(const UpdatePlan& plan, int chunk);
  // What steps and operators have changed of the hyper-parameters, once the step is over.
  void TakeOverrides(const StepSettings& settings, const StepVote& vote)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Commit(UpdatePlan plan);
  // A step of which all chunks are at their new state, or that is skipped.
  void RecordStep(KeptDecision decided, const StepTimes& times)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- job_speculation.cc
  bool CanSpeculate() const { return need_.speculation_bytes > 0; }
  // The chunk's final contribution is in, and its sums are current. A provisional update that can
  // run now, of whichever chunk, is the caller's to run or start, outside the lock.
  std::optional<Speculation::Task> SpeculateIfWorthwhile(int chunk, double squared_norm)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The one that waited longest for a buffer, if there is a buffer for it.
  std::optional<Speculation::Task> NextParked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Buffers have been given back.
  void StartParked();
  void StartProvisional(Speculation::Task task);
  void RunProvisional(Speculation::Task task);
  // The update of the task is made, where it could be. The listener that is to get its weights,
  // until StopSending; null: none is.
  std::shared_ptr<RankListener> FinishProvisional(const Speculation::Task& task,
                                                  const absl::StatusOr<ChunkStore::Write>& write);
  // Whether the rank's stream accepts provisional weights where these lie.
  static bool AcceptsProvisional(const RankEntry& rank, const WeightBuffer& weights);

  // ---- job_state.cc
  // Committed state, while the caller reads (Gate::StartReading).
  void StopReading();
  absl::StatusOr<Snapshot> SnapshotOf(absl::Span<const int> parameters,
                                      absl::Span<const int> chunks,
                                      ChunkStore::Room* room = nullptr)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `record`: the job's, or a copy of it.
  CheckpointIndex MakeIndex(const JobRecord& record) const;
  void ReadCommitted(int parameter, Plane plane, int64_t offset, absl::Span<float> out) const;
  std::string HashState(const CheckpointIndex& index) const;
  int64_t MostTraceEvents(uint32_t steps) const;

  // ---- job_load.cc
  absl::Status CheckLoadable(const Checkpoint& checkpoint) const;
  absl::Status LoadChunk(const Checkpoint& checkpoint, int chunk);
  // Of a job that has, or had, these groups: with the groups in this job's order.
  StepRecord WithGroups(const StepRecord& record,
                        absl::Span<const CheckpointIndex::Group> groups) const;
  // All that is small, as the index has it: of the parameters and groups that this job has, too.
  void TakeRecord(const CheckpointIndex& index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<OpenedCheckpoint> OpenToLoad(const LoadRequest& request) const;
  // Of a load that began then.
  void ReplaceState(OpenedCheckpoint& opened, std::chrono::steady_clock::time_point began,
                    Done<CheckpointInfo> done);
  bool WasUndone(const UndoRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckMayUndo(const UndoRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UndoNow(Done<uint64_t> done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- job_status.cc
  int64_t RankMemoryBytesNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  RankProgress ProgressOf(int rank, const RankInStep* state) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- job_save.cc
  struct Saving;
  absl::Status CheckMaySave(const SaveRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After a commit: saves, if the service's policy has that now.
  void SaveIfDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of a job that was taken over: what is due follows its newest checkpoint.
  void TakeOverSaves() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WarnOfSave(uint64_t step, const absl::Status& why) const;
  void SaveNow(std::shared_ptr<Saving> saving, std::shared_ptr<uint64_t> number)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // From now on the save is one that is under way.
  void EnterSaving(const std::shared_ptr<Saving>& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The save's chunks, so that steps go on beside it. RESOURCE_EXHAUSTED.
  absl::Status PinToSave(Saving& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The memory that pinning all chunks would want; on a thread that may wait.
  absl::Status MakeRoom() ABSL_LOCKS_EXCLUDED(making_room_, mutex_);
  // The same, for a save that holds decisions back meanwhile, and does to its end if there is none.
  void MakeRoomAndStart(const std::shared_ptr<Saving>& saving);
  void StartSaving(std::shared_ptr<Saving> saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On a thread that may wait for a disk.
  void BeginSaving(const std::shared_ptr<Saving>& saving);
  void SaveParts(const std::shared_ptr<Saving>& saving);
  void EndSaving(const std::shared_ptr<Saving>& saving, const absl::Status& status);
  // Lines of what was deleted because `saved`, in its folder, is newer.
  std::vector<std::string> DeleteOlderThan(const CheckpointFacts& saved, const std::string& folder);
  void TellOfSave(const Saving& saving, const absl::StatusOr<CheckpointInfo>& result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives up one that has not begun to write.
  void CancelSaving(const std::shared_ptr<Saving>& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetSaving(const std::shared_ptr<Saving>& saving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<SaveProgress> SavesUnderWay() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- job_recover.cc. Without named memory these do nothing.
  absl::Status AllocateKept();
  // Stores all that is small, as it is now.
  void Keep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void KeepDecision(const UpdatePlan& plan, uint32_t attempt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void KeepWord(const KeptWord& word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What has been added to the chunk, all of which is there.
  void KeepContribution(const Contribution& given, uint64_t epoch);
  // The chunk's gradient is changed without a record: until KeepContribution a later process finds
  // nothing of it, and the step is done again.
  void KeepLost(const Contribution& given, uint64_t epoch);
  void StopKeeping(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  class KeptRankMemory;
  absl::Status TakeOverState(std::string& story);
  void TakeOverRanks(const std::vector<KeptJob::Rank>& left, std::string& story)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckStepsInTable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RollForward(const KeptDecision& decision) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RollForwardChunk(const StepUpdate& update, int chunk, RedoLane* lane);
  void TakeOverStep(std::string& story) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Replay(const KeptWord& word) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of each rank's attempt, into gradients_ and ledger_.
  absl::Status RestoreContributions(const std::vector<uint32_t>& attempts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LoadAgain(const LoadRequest& request);

  const JobIdentity identity_;
  const Layout layout_;
  const JobEnvironment environment_;
  std::unique_ptr<KeptJob> kept_;  // Null: the job dies with this process. Constant once allocated.
  MemoryNeed need_;                // Constant once allocated, as the next.
  std::string speculation_refused_;  // Why a job that was to speculate waits.
  absl::Status broken_;              // What a broken job says; made before it is needed.
  // By parameter: it has its state from the origin. Empty: of a job that is derived from nothing.
  std::vector<bool> inherited_;  // Constant once allocated.

  MemoryBudget::Reservation reservation_;
  std::unique_ptr<GradientStore> gradients_;
  std::unique_ptr<ChunkStore> store_;
  std::shared_ptr<WeightBufferPool> weight_buffers_;
  TraceRecorder trace_;
  TrafficCounter traffic_;
  JobHistory history_;
  TaskQueue tasks_;  // All of the job's own.
  StreamCalls stream_calls_;

  mutable Mutex mutex_;
  // Notified of a commit and of the job's end, for a timeline that waits for long.
  CondVar step_over_;
  Gate gate_ ABSL_GUARDED_BY(mutex_);
  std::vector<After> after_ ABSL_GUARDED_BY(mutex_);
  JobRecord record_ ABSL_GUARDED_BY(mutex_);
  RankTable ranks_ ABSL_GUARDED_BY(mutex_);
  FirstWeights first_weights_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Progress> taking_first_weights_ ABSL_GUARDED_BY(mutex_);  // Null: none is there.
  std::shared_ptr<StateWriting> writing_ ABSL_GUARDED_BY(mutex_);           // By ranks. Null: none.
  uint64_t last_state_writer_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> last_state_write_ = 0;  // For the names of their memory.
  std::vector<std::shared_ptr<Saving>> saves_ ABSL_GUARDED_BY(mutex_);  // Oldest first.
  SaveSchedule save_schedule_ ABSL_GUARDED_BY(mutex_){std::chrono::steady_clock::now()};
  SaveCounts save_counts_ ABSL_GUARDED_BY(mutex_);
  Mutex making_room_;  // One thread at a time, before mutex_.
  std::unique_ptr<ChunkStore::Room> room_ ABSL_GUARDED_BY(mutex_);   // For the next save. Nullable.
  std::shared_ptr<Progress> room_progress_ ABSL_GUARDED_BY(mutex_);  // While it is made.

  // The step in progress.
  std::variant<std::monostate, OpenStep, SealedStep, DecidedStep> step_ ABSL_GUARDED_BY(mutex_);
  Ledger ledger_ ABSL_GUARDED_BY(mutex_);
  NormSums sums_ ABSL_GUARDED_BY(mutex_);
  Speculation speculation_ ABSL_GUARDED_BY(mutex_);
  // By rank, for what is queued for its chunks: another one once what it has given is over or
  // forgotten.
  std::vector<uint64_t> tickets_ ABSL_GUARDED_BY(mutex_);
  int64_t sealed_ns_ ABSL_GUARDED_BY(mutex_) = 0;       // Of a step that is traced.
  uint64_t given_up_step_ ABSL_GUARDED_BY(mutex_) = 0;  // The last one; 0: none.
  uint64_t changes_ ABSL_GUARDED_BY(mutex_) = 0;        // Use::changes.
  uint64_t moves_ ABSL_GUARDED_BY(mutex_) = 0;          // See Move.
  bool has_derived_ ABSL_GUARDED_BY(mutex_) = false;    // Since the last of them.
  uint64_t origin_moves_ ABSL_GUARDED_BY(mutex_) = 0;   // Of the origin, when this was derived.
  // By group, of the committed state; empty: nothing is known.
  std::vector<StateBounds> bounds_ ABSL_GUARDED_BY(mutex_);
  int64_t last_accumulators_in_use_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_IMPL_H_
