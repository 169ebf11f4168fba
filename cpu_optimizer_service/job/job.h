// One training run in the service: its state, its step in progress, its ranks.
//
// This and engine.h are the front of the engine. A transport (the server, or a test) opens a
// RankStream per rank and feeds it; the engine answers through the RankListener. No gRPC, no
// protobuf, no flags.
//
//   auto job = engine.CreateJob(spec).value();
//   for (each chunk) job->WriteInitialWeights(chunk, weights);
//   auto stream = job->OpenStream({.uid = job->uid(), .rank = 0, ...}, listener).value();
//   stream->BeginStep(1, {});
//   stream->Contribute(...);  stream->EndMicroStep(...);  stream->Seal(1, 1);
//   ... listener: OnDecision, OnWeights for each chunk of the rank, OnCommitted.
//
// Threads: everything is thread-safe; the calls on one RankStream come one at a time, and
// Contribute adds the payload on the caller's thread. No call blocks, except for the lock and for
// what each says of itself: calls that need the job to stand still (attaching, opening a stream,
// snapshots, saving, loading) or something of a rank to end (discarding, stopping provisional
// updates) take a Done and wait in the job's gate, not on their thread (pending.h). Their short
// forms without a Done wait for it, and are for tests and for threads that may block. Updates, sums
// of gradients in place, saving and loading run on the engine's threads. Listeners and Dones are
// called from any thread, with no lock held; they must not block. A job is kept alive by shared_ptr
// while a stream or a reader uses it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/gradients/rank_memory.h"
#include "cpu_optimizer_service/host/memory_budget.h"
#include "cpu_optimizer_service/host/trace.h"
#include "cpu_optimizer_service/job/job_status.h"
#include "cpu_optimizer_service/job/pending.h"
#include "cpu_optimizer_service/job/rank_stream.h"
#include "cpu_optimizer_service/job/step/state_writing.h"
#include "cpu_optimizer_service/state/checkpoint_writer.h"
#include "cpu_optimizer_service/state/snapshot.h"

namespace ballast {

inline constexpr size_t kMaxProcessIdBytes = 256;

// Who holds a rank: a process, in a generation.
struct RankHolder {
  int rank = 0;
  std::string process_id;
  Generation generation;
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
  std::optional<Generation> generation;
  // The process has held this rank before: FAILED_PRECONDITION if another has taken it since.
  bool rejoin = false;
};
struct Attachment {
  Generation generation;
  uint64_t committed_step = 0;  // As JobStatus has it.
  bool awaiting_weights = false;
};

// What was saved or loaded.
struct CheckpointInfo {
  std::string
      directory;  // Of the checkpoint; of a save that goes on in the background, its folder.
  uint64_t step = 0;
  Generation generation;                 // Of the job, after it.
  int64_t size_bytes = 0;                // Saved; 0 after a load.
  std::vector<std::string> passed_over;  // By a load: newer ones that are damaged, a line each.
};

class Job : public std::enable_shared_from_this<Job> {
 public:
  virtual ~Job() = default;

  virtual const JobSpec& spec() const = 0;  // As created.
  virtual const Layout& layout() const = 0;
  virtual const std::string& uid() const = 0;
  virtual const Derivation& derivation() const = 0;  // As created.
  virtual JobStatus Status() const = 0;
  // What the decided steps were like (job_history.h). Does not take the job's lock.
  virtual HistoryView History(const HistoryQuery& query) const = 0;
  // Where it is, as attaching returns it. Cheap, which Status is not: that copies all there is.
  virtual Attachment Position() const = 0;
  // Whether anybody uses it. Cheap.
  struct Use {
    int streams = 0;  // Of ranks, open now.
    // Rises whenever a rank attaches, opens or ends a stream or gives first weights, and whenever
    // the job's state changes: a step is committed, a checkpoint loaded, a group updated.
    uint64_t changes = 0;
    bool operator==(const Use&) const = default;
  };
  virtual Use use() const = 0;

  // Takes a rank; see AttachWorker in ballast.proto. Waits for a decision and update under way.
  virtual Pending Attach(AttachRequest request, Done<Attachment> done) = 0;
  absl::StatusOr<Attachment> Attach(const AttachRequest& request);
  // NOT_FOUND: another uid. ABORTED: another generation or process, found before any waiting.
  // Replaces the rank's older stream, and waits until what that one is adding has been added.
  virtual Pending OpenStream(OpenStreamRequest request, std::shared_ptr<RankListener> listener,
                             Done<std::unique_ptr<RankStream>> done) = 0;
  absl::StatusOr<std::unique_ptr<RankStream>> OpenStream(const OpenStreamRequest& request,
                                                         std::shared_ptr<RankListener> listener);

  // Memory that the rank's holder shares with this process: admitted first, then given. It is the
  // rank's until it is dropped, another process takes the rank, the generation rises or the job is
  // closed; should the step in progress still read gradients from it, until that is over. Giving
  // replaces what was given before.
  // RESOURCE_EXHAUSTED: the budget has no room.
  virtual absl::StatusOr<MemoryBudget::Reservation> ReserveRankMemory(int rank) = 0;
  // ABORTED: another process holds the rank. FAILED_PRECONDITION: the rank is in the middle of a
  // step. Waits for a decision and update under way, on the caller's thread.
  virtual absl::Status GiveRankMemory(const RankHolder& holder,
                                      std::shared_ptr<const RankMemory> memory) = 0;
  // Its process has let go of it. Nothing, if the rank has another by now.
  virtual void DropRankMemory(int rank, const RankMemory* memory) = 0;

  // Who uploads a rank's first weights, and with which state.
  struct Uploader {
    Generation generation;
    std::string process_id;
    uint64_t state = 0;    // A number of the job's.
    uint64_t session = 0;  // And of the rank's.
    bool moments = false;
  };
  // Called before a rank's first weights, by every rank with the same state. FAILED_PRECONDITION:
  // weights have arrived that came with another one. ABORTED: the holder has not the rank.
  virtual absl::StatusOr<Uploader> BeginFirstWeights(const RankHolder& holder,
                                                     FirstState state) = 0;
  // First weights of one chunk: chunk.elements fp32 values in pieces cut anywhere; with moments, as
  // many of exp_avg, of exp_avg_sq and, with amsgrad, of max_exp_avg_sq behind them. The job is ready
  // when every chunk has arrived; true then. Padding must be zero. ABORTED if an uploader is given
  // that does not have the chunk's rank any more. FAILED_PRECONDITION: another rank has begun with another
  // state since. What has arrived of a rank is forgotten when another process or session takes it, and
  // of all ranks when the generation rises.
  virtual absl::StatusOr<bool> WriteInitialWeights(
      int64_t chunk, absl::Span<const absl::Span<const std::byte>> payload,
      const std::optional<Uploader>& uploader = std::nullopt) = 0;

  // Planes of parameters are written between two steps, by all ranks alike: each begins its part,
  // brings the chunks of its own that hold any of that, and ends it. Nothing shows before the last
  // part has ended; then all of it is the committed state, and each Done is called with true. A rank
  // that begins the next step before is refused. A part is given up when its Pending is cancelled,
  // another process or session takes the rank, or the generation rises: ABORTED. There is no undo
  // of the step before it afterwards.
  // FAILED_PRECONDITION: another step, or another rank has begun the next one or writes something
  // else (OTHER_SETTINGS). INVALID_ARGUMENT: what can never work; values that no update leaves.
  // RESOURCE_EXHAUSTED: no memory for what is written, until all of it is there.
  struct StateWriter {
    int rank = 0;
    uint64_t id = 0;  // 0: the write is the job's state already.
  };
  virtual absl::StatusOr<StateWriter> BeginStateWrite(const RankHolder& holder,
                                                      StateWrite write) = 0;
  // Of each of the planes chunk.elements fp32 values, in pieces cut anywhere.
  virtual absl::Status WriteStateChunk(const StateWriter& writer, int64_t chunk,
                                       absl::Span<const absl::Span<const std::byte>> payload) = 0;
  virtual Pending EndStateWrite(const StateWriter& writer, Done<bool> done) = 0;
  // Gives the part up, unless the write is the job's state by now.
  virtual void DropStateWrite(const StateWriter& writer) = 0;
  // The same by an operator, of `number` 0 and without update counts, whatever the ranks do: the
  // caller fills what is prepared, and it becomes the state once no step is in progress. Trainers
  // have written weights with those of the next step. Done: the step that it follows.
  virtual absl::StatusOr<std::unique_ptr<StateWriting>> PrepareStateWrite(StateWrite write) = 0;
  virtual Pending CommitStateWrite(std::shared_ptr<StateWriting> writing, Done<uint64_t> done) = 0;

  // The weights of a chunk at `step` in its group's return dtype, into chunk.elements elements at
  // `out`. ABORTED: another generation. UNAVAILABLE: the chunk is being updated.
  // FAILED_PRECONDITION: the chunk is at another step.
  virtual absl::Status ReadShard(Generation generation, uint64_t step, int chunk,
                                 absl::Span<std::byte> out) = 0;

  // Tells every sealed rank of an open step, through OnWaiting, which ranks it waits for, and, while
  // votes are awaited, every rank that has voted. The server calls it when the seal deadline has
  // passed, and then again and again.
  virtual void TellWaiting() = 0;
  // When the first rank sealed the step in progress (steady clock); nullopt: none has.
  virtual std::optional<double> SecondsSinceFirstSeal() const = 0;

  // The aborted step. Raises the generation, so every rank attaches again and redoes the step; or
  // decides it as a skip, if all have begun it and the job says so (OnAbort). FAILED_PRECONDITION if
  // none has begun, or it is decided.
  virtual Pending AbortStep(Done<uint64_t> done) = 0;
  absl::StatusOr<uint64_t> AbortStep();
  // The undone step, the last committed one: state, update counts, hyper-parameters, the trainer's
  // state and the recent steps are what they were before it, bit for bit; of a skipped step only its
  // number and the latter three. What operators have changed of hyper-parameters since (UpdateGroup)
  // stays. Raises the generation, so every rank attaches again and goes on from the step before. Waits
  // for readers. FAILED_PRECONDITION if the job does not keep the previous version
  // (JobSpec::keep_previous), a step is in progress, or there is no step to undo: one alone can be,
  // and none that was committed before a load. A request that names the step and the generation that
  // it goes back from may be repeated: what has been done is answered like the first time. Of a job
  // that is elsewhere it is FAILED_PRECONDITION.
  struct UndoRequest {
    uint64_t step = 0;  // 0: whichever is the last.
    Generation generation;
  };
  virtual Pending UndoStep(UndoRequest request, Done<uint64_t> done) = 0;
  absl::StatusOr<uint64_t> UndoStep(const UndoRequest& request);
  absl::StatusOr<uint64_t> UndoStep() { return UndoStep(UndoRequest()); }
  // From the next BeginStep on. Returns the values then in force.
  virtual absl::StatusOr<HyperParameters> UpdateGroup(int group,
                                                      const HyperParameterOverrides& changes) = 0;

  // A consistent view of some parameters' state at the committed step; see snapshot.h.
  virtual Pending TakeSnapshot(std::vector<int> parameters, Done<Snapshot> done) = 0;
  absl::StatusOr<Snapshot> TakeSnapshot(absl::Span<const int> parameters);

  // Writes a new checkpoint (checkpoint.h) of the committed step into a folder of them
  // (checkpoint_folder.h), on threads of the engine's, while steps and everything else go on: chunks
  // that are updated meanwhile go to second versions. Nothing is replaced; once it is complete, those
  // of this job that are too many are deleted (CheckpointPolicy).
  // If the budget has no room for those, the next decision waits for the save. Waits for an update
  // that is running. Cancelled while it waits, or before its first byte, it frees what it has;
  // later it goes on to its end.
  // RESOURCE_EXHAUSTED: kMostSaves of the job are under way.
  struct SaveRequest {
    std::string folder;
    bool asked_for = true;    // False: the service saves by itself.
    bool background = false;  // Done when the versions are pinned; a failure then only warns.
  };
  virtual Pending Save(SaveRequest request, Done<CheckpointInfo> done) = 0;
  absl::StatusOr<CheckpointInfo> Save(const std::string& folder);
  // Replaces state, update counts, hyper-parameters, the trainer's state and the committed step by
  // a checkpoint's: that of `path`, or the newest good one in it (OpenNewest). Of the recent steps
  // only its last one is known then. Runs on a thread of the engine's.
  struct LoadRequest {
    std::string path;
    bool weights_only = false;  // Checkpoint::OpenWeights: the job begins anew with these weights.
  };
  virtual Pending Load(LoadRequest request, Done<CheckpointInfo> done) = 0;
  absl::StatusOr<CheckpointInfo> Load(const std::string& path, bool weights_only = false);
  // Records a timeline of the next `steps` steps to begin (trace.h), and returns it when the last
  // of them is committed; with what there is when the job is closed, or once `still_wanted`, asked
  // from time to time, says no. RESOURCE_EXHAUSTED if another is being taken. Blocks its thread.
  virtual absl::StatusOr<Trace> TraceSteps(uint32_t steps,
                                           const std::function<bool()>& still_wanted) = 0;
  // For all that takes part in a step, to record what it does.
  virtual TraceRecorder& trace() = 0;
  // SHA-256 in hex over the update counts and every element of every plane, by parameter: the same
  // for any world size, and unmoved by a skipped step. Waits for a decision and update under way,
  // on the caller's thread. Empty if the job is closed or torn.
  virtual std::string StateHash() = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_H_
