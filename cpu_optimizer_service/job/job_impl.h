// Job as it is built. Its functions are spread by subject:
//   job_impl.cc          creation, first weights, control, status
//   job_ranks.cc         who holds which rank: attaching, streams, generations
//   job_rank_memory.cc   memory that ranks share with this process
//   job_stream.cc        what a rank says in a step, up to the last seal
//   job_contribution.cc  the gradients among it, and their sums of squares
//   job_coverage.cc      who has sent what
//   job_speculation.cc   updates ahead of the decision
//   job_decision.cc      from the last seal to the commit
//   job_state.cc         looking at state, saving, loading
//   job_trace.cc         the timeline of some steps
//
// One mutex guards all that the ranks say; arithmetic happens outside it. These markers keep it
// apart:
//   in_flight   a rank's contribution is being added; clearing the step waits for it
//   sums_       whose sums of squares are being computed; a decision and a clearing wait for it
//   guesses_    what is updated ahead of the decision; see job_speculation.cc
//   clearing_   the undecided step is being forgotten; no other may begin
//   deciding_   a decision and its update are running: gradients and state belong to them
//   loading_    a checkpoint is being loaded: state belongs to it
//   holds_      readers of state, which hold back the next decision, and a load
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_IMPL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_IMPL_H_

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cpu_optimizer_service/common/mutex.h"
#include "cpu_optimizer_service/gradients/gradient_store.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "cpu_optimizer_service/job/job.h"
#include "cpu_optimizer_service/job/ledger.h"
#include "cpu_optimizer_service/job/speculation_history.h"
#include "cpu_optimizer_service/job/step.h"
#include "cpu_optimizer_service/state/checkpoint.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

// What a job shares with the others of its engine, all outliving it.
struct JobEnvironment {
  MemoryBudget* budget = nullptr;
  TaskPool* tasks = nullptr;
  ArenaFactory* arenas = nullptr;
  FileSystem* file_system = nullptr;
  const std::atomic<bool>* draining = nullptr;
};

class JobImpl : public Job {
 public:
  static absl::StatusOr<std::shared_ptr<JobImpl>> Create(JobSpec spec,
                                                         const JobEnvironment& environment);

  const JobSpec& spec() const override { return spec_; }
  const Layout& layout() const override { return layout_; }
  const std::string& uid() const override { return uid_; }
  JobStatus Status() const override;
  using Job::AbortStep;
  using Job::Attach;
  using Job::Load;
  using Job::OpenStream;
  using Job::Save;
  using Job::TakeSnapshot;
  Pending Attach(AttachRequest request, Done<Attachment> done) override {
    std::move(done)(AttachNow(request));
    return {};
  }
  Pending OpenStream(OpenStreamRequest request, std::shared_ptr<RankListener> listener,
                     Done<std::unique_ptr<RankStream>> done) override {
    std::move(done)(OpenStreamNow(request, std::move(listener)));
    return {};
  }
  Pending AbortStep(Done<uint64_t> done) override {
    std::move(done)(AbortStepNow());
    return {};
  }
  Pending TakeSnapshot(std::vector<int> parameters, Done<Snapshot> done) override {
    std::move(done)(TakeSnapshotNow(parameters));
    return {};
  }
  Pending Save(std::string directory, Done<CheckpointInfo> done) override {
    std::move(done)(SaveNow(directory));
    return {};
  }
  Pending Load(std::string directory, Done<CheckpointInfo> done) override {
    std::move(done)(LoadNow(directory));
    return {};
  }
  absl::StatusOr<Attachment> AttachNow(const AttachRequest& request);
  absl::StatusOr<std::unique_ptr<RankStream>> OpenStreamNow(const OpenStreamRequest& request,
                                                            std::shared_ptr<RankListener> listener);
  absl::StatusOr<bool> WriteInitialWeights(int64_t chunk,
                                           absl::Span<const absl::Span<const std::byte>> payload,
                                           const std::optional<Uploader>& uploader) override;
  absl::Status ReadShard(uint64_t generation, uint64_t step, int chunk,
                         absl::Span<std::byte> out) const override;
  void TellWaiting() override;
  std::optional<double> SecondsSinceFirstSeal() const override;
  absl::StatusOr<uint64_t> AbortStepNow();
  absl::StatusOr<HyperParameters> UpdateGroup(int group,
                                              const HyperParameterOverrides& changes) override;
  absl::StatusOr<Snapshot> TakeSnapshotNow(absl::Span<const int> parameters);
  absl::StatusOr<CheckpointInfo> SaveNow(const std::string& directory);
  absl::StatusOr<CheckpointInfo> LoadNow(const std::string& directory);
  std::string StateHash() const override;
  absl::StatusOr<MemoryBudget::Reservation> ReserveRankMemory(int rank) override;
  absl::Status GiveRankMemory(const RankHolder& holder,
                              std::shared_ptr<const RankMemory> memory) override;
  void DropRankMemory(int rank, const RankMemory* memory) override;
  absl::StatusOr<Trace> TraceSteps(uint32_t steps,
                                   const std::function<bool()>& still_wanted) override;
  TraceRecorder& trace() const override { return trace_; }

  // No step has begun or is being decided.
  bool IsBetweenSteps() const;
  // Waits for a running update, then clears the step and detaches all streams.
  void Close();

 private:
  class Stream;
  class Hold;
  using Listeners = std::vector<std::shared_ptr<RankListener>>;

  struct Rank {
    std::string process_id;       // Empty: the rank is free.
    std::string last_process_id;  // Who took it last, also when it is free.
    uint64_t stream = 0;          // Number of its stream; 0: none.
    std::shared_ptr<RankListener> listener;
    UpdateMode update_mode = UpdateMode::kWait;  // Of its stream, as the next.
    bool weights_in_place = false;
    int in_flight = 0;
    bool left = false;  // Its stream ended in mid-step; free once the step is over.
    std::shared_ptr<const RankMemory> memory;  // Shared with its process; null: none.
    int64_t memory_bytes = 0;
    // Of which the step in progress reads gradients. The same one, unless that has been dropped.
    std::shared_ptr<const RankMemory> lender;
  };
  using RankMemories = std::vector<std::shared_ptr<const RankMemory>>;
  // What a new generation lets go of; to be dealt with outside the lock.
  struct Detached {
    Listeners listeners;
    RankMemories memories;
  };
  // Identifies a stream to the calls that come through it.
  struct StreamKey {
    int rank = 0;
    uint64_t stream = 0;
  };
  // What the update of any chunk needs, besides its gradient.
  struct Update {
    uint64_t step = 0;
    std::vector<HyperParameters> hyper_parameters;  // By group.
    std::vector<float> multipliers;                 // By group.
    std::vector<int64_t> update_counts;  // By parameter, of this update; 0: it is left as it is.
  };
  // A chunk's update ahead of the decision.
  struct Guess {
    enum class State : uint8_t { kNone, kQueued, kRunning, kReady };
    State state = State::kNone;
    std::shared_ptr<const Update> update;  // Of the one that is queued or running.
    uint64_t told_stream = 0;              // The stream that was told its weights; 0: none.
    SpeculationHistory history;

    void Reset() { *this = Guess{.history = history}; }
  };
  // A guess that can run: it has a place for the weights.
  struct GuessTask {
    int chunk = 0;
    std::shared_ptr<const Update> update;
    WeightBuffer shard;
  };
  // Of a chunk, in the step in progress.
  enum class SumsState : uint8_t { kNone, kRunning, kCurrent };
  // All that follows from a decision, so that it runs without the mutex.
  struct UpdatePlan {
    StepOutcome outcome;
    StepTerms terms;
    uint32_t micro_steps = 0;
    Update update;
    Listeners listeners;            // By rank; may be null.
    RankMemories weights_in_place;  // By rank: where its weights are written; may be null.
    // What is left to do for a chunk: all of it; to tell the weights of a guess that became true,
    // of which the rank's stream has not heard; nothing.
    enum class Left : uint8_t { kUpdate, kTell, kNothing };
    std::vector<Left> left;                 // By chunk. Empty in a job that waits, as the next two.
    std::vector<ChunkStore::Write> holds;   // Guesses that became true.
    std::vector<std::vector<int>> dropped;  // By rank: guesses that it knows and that did not.
    int64_t chunks_left = 0;
    SpeculationCounts speculation;
  };

  JobImpl(JobSpec spec, Layout layout, const JobEnvironment& environment);
  absl::Status Allocate();

  // job_ranks.cc
  bool IsCurrent(const StreamKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckGeneration(uint64_t generation) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCurrent(const StreamKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseStream(const StreamKey& key);
  // Waits until the rank can have a new stream; `replaced` gets the listener of the older one.
  absl::Status AwaitClaim(const OpenStreamRequest& request, Listeners& replaced)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void TakeListener(Rank& rank, Listeners& taken);
  void ForgetFirstWeights(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckAttachRequest(const AttachRequest& request) const;
  // Whether the rank has a part in the step in progress.
  bool HasBegun(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether another process holds the rank.
  bool IsTaken(const AttachRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckMayAttach(const AttachRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  RankPosition PositionOf(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the undecided step, once contributions in flight have ended.
  void ClearStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Clears the undecided step, frees all ranks, which have no memory in common with us any more.
  Detached RaiseGeneration() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Detach(const Listeners& listeners, const absl::Status& status);
  static void FreeIfLeft(Rank& rank);
  // Waits for a decision, update, load or clearing that is running.
  void WaitUntilSettled() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // As above, and also for a decision that is held back. UNAVAILABLE while loading.
  absl::Status WaitUntilDecided() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckUsable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // job_stream.cc
  absl::Status BeginStep(const StreamKey& key, uint64_t step, const StepSettings& settings);
  absl::Status EndMicroStep(const StreamKey& key, uint64_t step, uint32_t micro_step,
                            UsedParameters used);
  absl::StatusOr<std::optional<SealRefusal>> Seal(const StreamKey& key, uint64_t step,
                                                  uint32_t micro_steps);
  absl::StatusOr<StepTerms> MakeTerms(uint64_t step, const StepSettings& settings) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckUsed(int rank, const UsedParameters& used) const;
  absl::StatusOr<OpenStep*> FindOpenStep(uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasTakenSeal(uint64_t step, uint32_t micro_steps) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<SealRefusal> CheckRankIsWhole(const OpenStep& open, int rank,
                                              uint32_t micro_steps) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<SealRefusal> CheckStepIsWhole(const OpenStep& open, int last_rank) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<SealRefusal> CheckParameters(const OpenStep& open, int last_rank) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A chunk that came as empty for a micro-step in which one of its parameters was used.
  std::optional<SealRefusal> CheckEmpties(const OpenStep& open) const;
  // A chunk that has a non-zero gradient in elements [begin, end) of a flat space, or -1.
  int ChunkWithGradient(int group, int64_t begin, int64_t end) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasGradient(int chunk, int64_t begin, int64_t end) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // job_contribution.cc
  absl::StatusOr<ContributionResult> Contribute(const StreamKey& key, const Contribution& given);
  absl::Status CheckContribution(int rank, const Contribution& given) const;
  // A contribution that the ledger wants: what is still to be done with it, outside the lock.
  struct Accepted {
    bool repeat = false;                       // Nothing.
    bool borrowed = false;                     // It is held already; only its sums are wanted.
    std::shared_ptr<const RankMemory> memory;  // Where it lies, if in place.
    std::shared_ptr<const Update> guess;
    uint64_t attempt = 0;
  };
  absl::StatusOr<Accepted> Take(const StreamKey& key, const Contribution& given)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddToGradient(const Contribution& given, const RankMemory* memory);
  // Computes the chunk's sums; returns about what they add to the squared norm that is guessed.
  double ComputeSums(uint64_t step, int chunk, const Update* guess);
  // Has the sums of a chunk computed by a task, unless it comes too late for `attempt`.
  void StartSums(uint64_t step, int chunk, uint64_t attempt);
  void RunSums(uint64_t step, int chunk, uint64_t attempt);
  // Computes what no task has begun and waits for the others. No more come in this step.
  void FinishSums();
  // Tasks of one chunk run near its memory.
  void StartOfChunk(int chunk, std::function<void()> task);

  // job_coverage.cc
  // Whether the rank's backward reached some parameter in every micro-step, where it must.
  std::optional<SealRefusal> CheckBackwardReached(const OpenStep& open, int rank) const;
  // `state` is null between steps.
  RankProgress ProgressOf(int rank, const RankInStep* state) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Parameters with elements in chunks of the rank that stand elsewhere; the first kMissingNames.
  std::vector<std::string> NamesBehind(int rank, uint32_t micro_step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // job_rank_memory.cc
  int64_t RankMemoryBytes(int rank) const;

  // job_speculation.cc
  bool CanSpeculate() const;
  // What the step's update will be if nothing is clipped or unused; null if no guess can hold.
  std::shared_ptr<const Update> MakeGuess(const StepTerms& terms) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of a chunk whose sums are current, unscaled and divided; only guesses depend on it.
  double SquaredNormOf(int chunk, const Update& guess) const;
  // The chunk's final contribution is in, and its sums are current. A guess that can run now, of
  // whichever chunk, is the caller's to run or start, outside the lock.
  std::optional<GuessTask> GuessIfWorthwhile(int chunk, double squared_norm)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next guess that waited for a shard buffer, if there is one for it.
  std::optional<GuessTask> NextParkedGuess() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Buffers have come back.
  void StartParkedGuesses();
  void StartGuess(GuessTask task);
  void RunGuess(GuessTask task);
  bool TakesProvisional(const Rank& rank, const WeightBuffer& shard) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Cancels what is queued and waits for what is running; no guess starts in this step any more.
  void FinishGuesses() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropGuesses() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // By chunk: whether a guess of it holds, made or not.
  std::vector<bool> WouldHold(const UpdatePlan& plan) const;
  // Takes the guesses that hold into the plan and drops the others. None is queued or running.
  void SettleGuesses(UpdatePlan& plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // job_decision.cc
  void StartDecisionIfDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunDecision();
  StepOutcome MakeOutcome(const SealedStep& sealed);
  // Why a step is skipped; `report` is what a worker found before reducing.
  std::string DescribeNonFinite(const std::optional<NonFiniteReport>& report) const;
  UpdatePlan Decide(StepOutcome outcome) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UpdateTo(const Update& update, int chunk, const ChunkStore::Write& write,
                const WeightBuffer& shard);
  int64_t ShardBytes(int chunk) const;
  WeightBuffer ShardFor(const UpdatePlan& plan, int chunk);
  void UpdateChunks(const UpdatePlan& plan);
  void ApplyToChunk(const UpdatePlan& plan, int chunk);
  void TellGuessedWeights(const UpdatePlan& plan, int chunk);
  void Commit(UpdatePlan& plan);

  // job_trace.cc
  int64_t MostTraceEvents(uint32_t steps) const;
  uint64_t NextStepToBegin() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // job_state.cc
  CheckpointIndex MakeIndex() const;
  void ReadCommitted(int parameter, Plane plane, int64_t offset, absl::Span<float> out) const;
  absl::Status CheckLoadable(const Checkpoint& checkpoint) const;
  absl::Status LoadChunk(const Checkpoint& checkpoint, int chunk);
  // The record of the checkpoint's last step, with the groups in this job's order.
  StepRecord LastRecord(const CheckpointIndex& index) const;

  const JobSpec spec_;
  const Layout layout_;
  const JobEnvironment environment_;
  const std::string uid_;
  MemoryNeed need_;                  // Constant once allocated, as the next.
  std::string speculation_refused_;  // Why a job that was to speculate waits.

  MemoryBudget::Reservation reservation_;
  std::unique_ptr<GradientStore> gradients_;
  std::unique_ptr<ChunkStore> store_;
  std::shared_ptr<WeightBufferPool> weight_buffers_;

  mutable TraceRecorder trace_;

  mutable Mutex mutex_;
  mutable CondVar changed_;
  CondVar step_over_;  // Told of a commit and of the job's end alone, for those who wait for long.
  int64_t sealed_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // Of a step that is traced.
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t committed_step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_stream_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);  // State may be torn: only a load helps.
  bool clearing_ ABSL_GUARDED_BY(mutex_) = false;
  bool loading_ ABSL_GUARDED_BY(mutex_) = false;
  mutable bool deciding_ ABSL_GUARDED_BY(mutex_) = false;
  mutable int holds_ ABSL_GUARDED_BY(mutex_) = 0;
  std::variant<std::monostate, OpenStep, SealedStep, DecidedStep> step_ ABSL_GUARDED_BY(mutex_);
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mutex_);
  Ledger ledger_ ABSL_GUARDED_BY(mutex_);
  // Rises when the step in progress is over or forgotten: what was queued for it is void then.
  uint64_t attempt_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<SumsState> sums_ ABSL_GUARDED_BY(mutex_);  // By chunk.
  int64_t sums_running_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Guess> guesses_ ABSL_GUARDED_BY(mutex_);                   // By chunk.
  std::vector<ChunkStore::Write> guess_writes_ ABSL_GUARDED_BY(mutex_);  // Of those that are ready.
  std::deque<int> parked_guesses_ ABSL_GUARDED_BY(mutex_);  // Queued, without a shard buffer.
  // Of the step in progress; null: no more guesses in it.
  std::shared_ptr<const Update> guess_ ABSL_GUARDED_BY(mutex_);
  double guessed_squared_norm_ ABSL_GUARDED_BY(mutex_) = 0;  // Of final contributions, about.
  int64_t guesses_running_ ABSL_GUARDED_BY(mutex_) = 0;
  SpeculationCounts speculation_ ABSL_GUARDED_BY(mutex_);      // Since creation.
  std::vector<bool> weights_arrived_ ABSL_GUARDED_BY(mutex_);  // By chunk.
  int64_t weights_missing_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<HyperParameters> hyper_parameters_ ABSL_GUARDED_BY(mutex_);  // By group, in force.
  // By group: what UpdateGroup changed while a step was in progress; comes after its overrides.
  std::vector<HyperParameterOverrides> later_changes_ ABSL_GUARDED_BY(mutex_);
  std::vector<int64_t> update_counts_ ABSL_GUARDED_BY(mutex_);  // By parameter.
  std::deque<StepRecord> recent_steps_ ABSL_GUARDED_BY(mutex_);
  uint64_t applied_steps_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t skipped_steps_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t coverage_complete_steps_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string trainer_state_ ABSL_GUARDED_BY(mutex_);  // Of the last committed step.
  int64_t last_accumulators_in_use_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_IMPL_H_
