// One training run in the service: its state, its step in progress, its ranks.
//
// This and engine.h are the front of the engine. A transport (the server, or a test) opens a
// RankStream per rank and feeds it; the engine answers through the RankListener. No gRPC, no
// protobuf, no flags.
//
//   auto job = engine.CreateJob(spec).value();
//   for (each chunk) job->WriteInitialWeights(chunk, weights);
//   auto stream = job->OpenStream({.uid = job->uid(), .rank = 0, ...}, listener).value();
//   stream->BeginStep(1, {});  stream->Contribute(...);  stream->EndMicroStep(...); stream->Seal(1,
//   1);
//   ... listener: OnDecision, OnWeights for each chunk of the rank, OnCommitted.
//
// Speculation is job_speculation.cc's: the rule by which chunks are guessed is in guess_history.h.
//
// Threads: everything is thread-safe; the calls on one RankStream come one at a time. Contribute
// adds the payload on the caller's thread; Save and Load do all their work on it; calls that need
// the job to stand still (Attach, OpenStream, GiveRankMemory, TakeSnapshot, the first weights) wait
// for a decision and update under way. Updates, and the sums of gradients in place, run on the
// engine's threads. Listeners are called from any thread, with no lock held; they must not block,
// and may call back only what does not wait: Status and ReadShard. A job is kept alive by
// shared_ptr while a stream or a reader uses it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/memory_budget.h"
#include "cpu_optimizer_service/rank_memory.h"
#include "cpu_optimizer_service/shard_buffer.h"
#include "cpu_optimizer_service/snapshot.h"
#include "cpu_optimizer_service/trace.h"

namespace ballast {

inline constexpr size_t kMaxProcessIdBytes = 256;
inline constexpr size_t kRecentSteps = 64;    // How many decisions a job remembers.
inline constexpr size_t kRecordedNames = 64;  // Unused parameters that a record of a step names.
inline constexpr size_t kMaxTrainerStateBytes = 4096;

// What the engine allocates for a job, in bytes.
struct MemoryNeed {
  int64_t state_bytes = 0;        // master, exp_avg, exp_avg_sq (, max_exp_avg_sq)
  int64_t gradient_bytes = 0;     // one contribution of every chunk, in the wire dtype
  int64_t accumulator_bytes = 0;  // fp32 sums, unless max_micro_steps is 1
  int64_t speculation_bytes = 0;  // second versions of all chunks, if the job speculates
  int64_t other_bytes = 0;        // shard buffers, block sums, tables
  int64_t total_bytes() const {
    return state_bytes + gradient_bytes + accumulator_bytes + speculation_bytes + other_bytes;
  }
};
MemoryNeed NeedOf(const JobSpec& spec, const Layout& layout);

enum class JobPhase : uint8_t { kAwaitingWeights, kReady, kOpen, kSealed, kUpdating, kClosed };

// What begin_step says. All ranks say the same.
struct StepSettings {
  GradientScale scale;
  std::map<int, HyperParameterOverrides> overrides;  // By group; they stay in force.
  // What the trainer wants to find again after a restart: kept once the step is committed. At most
  // kMaxTrainerStateBytes.
  std::string trainer_state;
};

// One piece of gradient: chunk `chunk`'s elements, summed over ranks and micro-steps
// [micro_step_begin, micro_step_end), in the group's wire dtype. The payload may come in pieces,
// cut anywhere. Empty contributions have no payload and count as zeros. After a final one nothing
// more is taken for the chunk in this step.
//
// One that is `in_place` has no payload either: it lies at its place in the rank's memory. If it is
// final and the chunk's first of the step, it is read from there until the step is over, and must
// not change; otherwise it has been read when Contribute returns.
struct Contribution {
  uint64_t step = 0;
  int64_t chunk = 0;
  uint32_t micro_step_begin = 0;
  uint32_t micro_step_end = 1;
  bool final = false;
  bool empty = false;
  bool in_place = false;
  absl::Span<const absl::Span<const std::byte>> payload;
};
enum class ContributionResult : uint8_t { kAdded, kRepeat };

// Which parameters received a gradient on a rank in a micro-step.
struct UsedParameters {
  bool all = true;  // All trainable ones; the list is then empty.
  std::vector<int> parameters;
  // Of workers that check before reducing: the first element that was not finite.
  struct NonFinite {
    int parameter = 0;
    int64_t element = 0;
    float value = 0;
  };
  std::optional<NonFinite> non_finite;
};

struct MissingContribution {
  int rank = 0;
  uint32_t micro_step = 0;
  std::vector<std::string> parameters;
};

// Why a seal did not take. status is FAILED_PRECONDITION and its message names the first of
// `missing`.
struct SealRefusal {
  absl::Status status;
  std::vector<MissingContribution> missing;
};

struct StepOutcome {
  uint64_t step = 0;
  Decision decision;
  std::string skip_reason;  // Why decision.apply is false; names the first non-finite parameter.
  std::vector<std::string> unused_parameters;
};

class RankListener {
 public:
  virtual ~RankListener() = default;
  // The calls of one step come in this order; OnWeights once for each chunk of the rank's
  // partition that has not come provisionally and stayed, in no order, and not at all when the step
  // is skipped. OnWaiting alone may come late.
  virtual void OnWaiting(uint64_t step, const std::vector<int>& ranks) = 0;
  // A seal of this rank that was taken at first has been undone, because at the last rank's seal
  // the step was not whole. The step is open; whoever has to send something does so, and all seal
  // again.
  virtual void OnSealRefused(uint64_t step, const SealRefusal& refusal) = 0;
  // Weights of the next step, should it be applied without clipping, as guessed: before OnDecision,
  // at most once for each chunk. Only if the stream was opened to speculate.
  virtual void OnProvisionalWeights(uint64_t step, int chunk, ShardBuffer shard) = 0;
  // Of the provisional weights told to this listener, those of `dropped_chunks` are not the step's
  // (they follow through OnWeights); the others are, and do not come again. Of a skipped step none
  // is.
  virtual void OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) = 0;
  // `shard` is null when the pool was empty: the listener calls Job::ReadShard when it can send.
  virtual void OnWeights(uint64_t step, int chunk, ShardBuffer shard) = 0;
  virtual void OnCommitted(uint64_t step, double update_seconds) = 0;
  // The stream is no longer the rank's: ABORTED (replaced, older generation, closed job). Of what
  // was on its way, OnWaiting, OnSealRefused, OnProvisionalWeights and OnCommitted may still come.
  virtual void OnDetached(const absl::Status& status) = 0;
};

struct ChunkProgress {
  int chunk = 0;
  uint32_t next_micro_step = 0;
};

// Where a rank stands, for a stream that is opened in mid-step.
struct RankPosition {
  uint64_t generation = 0;
  uint64_t committed_step = 0;
  uint64_t open_step = 0;  // 0: the rank has not begun one.
  uint32_t micro_steps_ended = 0;
  std::vector<ChunkProgress> delivered;  // Chunks whose count is not 0.
};

class Job;

// A rank's way into its job. Every call says ABORTED once the stream has been replaced or the
// generation has risen, and has then done nothing. Destroying it detaches the listener; the step
// stays.
class RankStream {
 public:
  virtual ~RankStream() = default;
  virtual const RankPosition& position() const = 0;  // At opening.

  // FAILED_PRECONDITION: wrong step, no weights yet, or other settings than the ranks before (the
  // first difference named). Repeating it with the same settings is OK.
  virtual absl::Status BeginStep(uint64_t step, const StepSettings& settings) = 0;
  // Verifies all before touching anything. INVALID_ARGUMENT: unknown chunk, not this rank's, wrong
  // size. FAILED_PRECONDITION: wrong step, micro-steps that do not follow on, or beyond
  // max_micro_steps. When it returns OK the payload may be reused.
  virtual absl::StatusOr<ContributionResult> Contribute(const Contribution& contribution) = 0;
  virtual absl::Status EndMicroStep(uint64_t step, uint32_t micro_step,
                                    const UsedParameters& used) = 0;
  // nullopt: taken. The decision comes through the listener, perhaps before this returns. A refusal
  // leaves the step open, for this rank as if it had not sealed. An error is a request that can
  // never work (wrong step, zero micro-steps).
  virtual absl::StatusOr<std::optional<SealRefusal>> Seal(uint64_t step, uint32_t micro_steps) = 0;
};

struct OpenStreamRequest {
  std::string uid;
  int rank = 0;
  std::string process_id;
  uint64_t generation = 0;
  UpdateMode update_mode = UpdateMode::kWait;  // kSpeculate: takes provisional weights.
  // Weights are written to the rank's memory, and the shards that the listener gets say so
  // (ShardBuffer::in_place). FAILED_PRECONDITION if the rank has none.
  bool weights_in_place = false;
};

// Who holds a rank: a process, in a generation.
struct RankHolder {
  int rank = 0;
  std::string process_id;
  uint64_t generation = 0;
};

struct AttachRequest {
  int rank = 0;
  std::string process_id;
  std::string uid;                                  // Empty: not checked.
  std::optional<uint64_t> expected_committed_step;  // Absent: not checked.
  std::optional<JobSpec> spec;                      // Absent: not checked.
  // For a stream that is to be reopened: ABORTED if the job's is another, or if another process has
  // taken the rank. Without it, taking a taken rank raises the generation, and so does
  // coming again to a step that the rank has begun.
  std::optional<uint64_t> generation;
  // The process has held this rank before: FAILED_PRECONDITION if another has taken it since.
  bool rejoin = false;
  // Attaching may wait for an update or a save. Asked afterwards, if given: CANCELLED, and nothing
  // done, if nobody waits for the answer any more.
  std::function<bool()> still_wanted;
};
struct Attachment {
  uint64_t generation = 0;
  uint64_t committed_step = 0;
  bool awaiting_weights = false;
};

// Updates computed before their decision.
struct SpeculationCounts {
  int64_t speculated = 0;
  int64_t published = 0;  // Of those, the ones that became the chunk's state,
  int64_t redone = 0;     // and the ones dropped and computed again; of skipped steps, neither.
};

struct StepRecord {
  StepOutcome outcome;
  SpeculationCounts speculation;  // Of this step, in chunks.
  uint32_t micro_steps = 0;
  double loss_scale = 1;
  std::vector<HyperParameters> hyper_parameters;  // One per group, as used.
};

struct RankProgress {
  bool attached = false;
  std::string process_id;
  bool begun = false;
  uint32_t micro_steps_ended = 0;
  bool sealed = false;
  bool shared_memory = false;  // It has memory in common with this process.
  int64_t chunks = 0;
  int64_t chunks_complete = 0;                  // That stand at:
  uint32_t furthest_micro_step = 0;             // the sealed number, or that of the furthest chunk.
  std::vector<std::string> missing_parameters;  // With chunks that do not; the first kMissingNames.
};
inline constexpr size_t kMissingNames = 16;

// A consistent picture of a job.
struct JobStatus {
  uint64_t generation = 0;
  uint64_t committed_step = 0;
  JobPhase phase = JobPhase::kAwaitingWeights;
  uint64_t applied_steps = 0;
  uint64_t skipped_steps = 0;
  // Decided steps of which the ledger held every micro-step of every chunk: all, or a bug.
  uint64_t coverage_complete_steps = 0;
  SpeculationCounts speculation;    // Since creation.
  int64_t speculation_paused = 0;   // Chunks whose guesses failed too often of late.
  std::string speculation_refused;  // Why a job that was to speculate waits; empty: it does not.
  std::string trainer_state;        // As the last committed step's begin gave it.
  MemoryNeed memory;
  int64_t accumulators_in_use = 0;
  int64_t rank_memory_bytes = 0;  // Given to ranks, now; beside `memory`.
  std::vector<RankProgress> ranks;
  std::vector<StepRecord> recent_steps;           // Oldest first, a bounded number.
  std::vector<HyperParameters> hyper_parameters;  // One per group, now in force.
  std::vector<int64_t> update_counts;             // By parameter; 0 for a frozen one.
};

// What was saved or loaded.
struct CheckpointInfo {
  uint64_t step = 0;
  uint64_t generation = 0;  // Of the job, after it.
  int64_t size_bytes = 0;   // Saved; 0 after a load.
};

class Job : public std::enable_shared_from_this<Job> {
 public:
  virtual ~Job() = default;

  virtual const JobSpec& spec() const = 0;  // As created.
  virtual const Layout& layout() const = 0;
  virtual const std::string& uid() const = 0;
  virtual JobStatus Status() const = 0;

  // Takes a rank; see AttachWorker in ballast.proto.
  virtual absl::StatusOr<Attachment> Attach(const AttachRequest& request) = 0;
  // NOT_FOUND: another uid. ABORTED: another generation or process. Replaces the rank's older
  // stream.
  virtual absl::StatusOr<std::unique_ptr<RankStream>> OpenStream(
      const OpenStreamRequest& request, std::shared_ptr<RankListener> listener) = 0;

  // Memory that the rank's holder shares with this process: admitted first, then given. It is the
  // rank's until it is dropped, another process takes the rank, the generation rises or the job is
  // closed; should the step in progress still read gradients from it, until that is over. Giving
  // replaces what was given before.
  // RESOURCE_EXHAUSTED: the budget has no room.
  virtual absl::StatusOr<MemoryBudget::Reservation> ReserveRankMemory(int rank) = 0;
  // ABORTED: somebody else holds the rank. FAILED_PRECONDITION: the rank is in the middle of a
  // step.
  virtual absl::Status GiveRankMemory(const RankHolder& holder,
                                      std::shared_ptr<const RankMemory> memory) = 0;
  // Its process has let go of it. Nothing, if the rank has another by now.
  virtual void DropRankMemory(int rank, const RankMemory* memory) = 0;

  // First weights of one chunk: chunk.elements fp32 values in pieces cut anywhere. The job is ready
  // when every chunk has come; true then. Padding must be zero.
  // ABORTED if an uploader is given that does not hold the chunk's rank. What has come of a rank is
  // forgotten when another process takes it, and of all ranks when the generation rises.
  struct Uploader {
    uint64_t generation = 0;
    std::string process_id;
  };
  virtual absl::StatusOr<bool> WriteInitialWeights(
      int64_t chunk, absl::Span<const absl::Span<const std::byte>> payload,
      const std::optional<Uploader>& uploader = std::nullopt) = 0;

  // The weights of a chunk at `step` in its group's return dtype, into chunk.elements elements at
  // `out`. ABORTED: another generation. UNAVAILABLE: the chunk is being updated.
  // FAILED_PRECONDITION: the chunk stands at another step.
  virtual absl::Status ReadShard(uint64_t generation, uint64_t step, int chunk,
                                 absl::Span<std::byte> out) const = 0;

  // Tells every sealed rank of an open step, through OnWaiting, which ranks it waits for. The
  // server calls it when the seal deadline has passed, and then again and again.
  virtual void TellWaiting() = 0;
  // When the first rank sealed the step in progress (steady clock); nullopt: none has.
  virtual std::optional<double> SecondsSinceFirstSeal() const = 0;

  // The aborted step. Raises the generation, so every rank attaches again and redoes the step.
  // FAILED_PRECONDITION if none has begun, or it is decided.
  virtual absl::StatusOr<uint64_t> AbortStep() = 0;
  // From the next BeginStep on. Returns the values then in force.
  virtual absl::StatusOr<HyperParameters> UpdateGroup(int group,
                                                      const HyperParameterOverrides& changes) = 0;

  // A consistent view of some parameters' state at the committed step; see snapshot.h.
  virtual absl::StatusOr<Snapshot> TakeSnapshot(absl::Span<const int> parameters) = 0;

  // Writes a checkpoint directory (checkpoint.h), between steps: waits for an update that is
  // running and holds back the next.
  virtual absl::StatusOr<CheckpointInfo> Save(const std::string& directory) = 0;
  // Replaces state, update counts, hyper-parameters, the trainer's state and the committed step by
  // a checkpoint's. Of the recent steps only its last one is known then.
  virtual absl::StatusOr<CheckpointInfo> Load(const std::string& directory) = 0;
  // Records a timeline of the next `steps` steps to begin (trace.h), and returns it when the last
  // of them is committed; with what there is when the job is closed, or once `still_wanted`, asked
  // from time to time, says no. RESOURCE_EXHAUSTED if another is being taken.
  virtual absl::StatusOr<Trace> TraceSteps(uint32_t steps,
                                           const std::function<bool()>& still_wanted) = 0;
  // For whoever takes part in a step, to record what it does.
  virtual TraceRecorder& trace() const = 0;
  // SHA-256 in hex over the update counts and every element of every plane, by parameter: the same
  // for any world size, and unmoved by a skipped step.
  virtual std::string StateHash() const = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_H_
