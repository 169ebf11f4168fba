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
// Threads: everything is thread-safe. Calls on one RankStream come one at a time, and Contribute
// adds the payload on the caller's thread. Calls block only for the lock, unless they say
// otherwise. Some calls need the job to stand still (attaching, opening a stream, snapshots,
// saving, loading), or wait for a rank's computations (discarding, stopping provisional updates).
// They take a Done and wait in the job's gate, not on their thread (pending.h). Their short forms
// without a Done block; they are for tests and for threads that may block.
//
// Updates, sums of gradients in place, saving and loading run on the engine's threads. Listeners
// and Dones are called from any thread, without a lock, and must not block. Streams and readers
// keep the job alive by shared_ptr.
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

// The holder of a rank: a process, in a generation.
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
  // To reopen a stream: ABORTED if the job has another generation, or another process has taken the
  // rank. Without it the generation rises if the rank is taken, or if the rank has begun the step.
  std::optional<Generation> generation;
  // The process has held this rank before. If another process has taken it since:
  // FAILED_PRECONDITION.
  bool rejoin = false;
};
struct Attachment {
  Generation generation;
  uint64_t committed_step = 0;  // As JobStatus has it.
  bool awaiting_weights = false;
};

// A saved or loaded checkpoint.
struct CheckpointInfo {
  std::string directory;  // The checkpoint's; for a save in the background, its folder's.
  uint64_t step = 0;
  Generation generation;                 // The job's, afterwards.
  int64_t size_bytes = 0;                // Saved; 0 after a load.
  std::vector<std::string> passed_over;  // At a load: newer damaged ones, a line each.
};

struct Follow;
struct LeadWord;
struct MemberWord;
template <typename Word>
class WordSink;

class Job : public std::enable_shared_from_this<Job> {
 public:
  virtual ~Job() = default;

  virtual const JobSpec& spec() const = 0;  // As created.
  virtual const Layout& layout() const = 0;
  virtual const std::string& uid() const = 0;
  virtual const Derivation& derivation() const = 0;  // As created.
  virtual JobStatus Status() const = 0;
  // The history of decided steps (job_history.h). Does not take the job's lock.
  virtual HistoryView History(const HistoryQuery& query) const = 0;
  // Where the job stands, as returned by attaching. Cheap. Status is not cheap: it copies
  // everything.
  virtual Attachment Position() const = 0;
  // Whether the job is in use. Cheap.
  struct Use {
    int streams = 0;  // Of ranks, open now.
    // Rises whenever a rank attaches, opens or ends a stream or gives first weights. Rises also
    // whenever the job's state changes: a step is committed, a checkpoint loaded, a group updated.
    uint64_t changes = 0;
    bool operator==(const Use&) const = default;
  };
  virtual Use use() const = 0;

  // Takes a rank; see AttachWorker in jobs.proto. Waits for a decision and update in progress.
  virtual Pending Attach(AttachRequest request, Done<Attachment> done) = 0;
  absl::StatusOr<Attachment> Attach(const AttachRequest& request);
  // NOT_FOUND: another uid. ABORTED: another generation or process, found before any waiting.
  // Replaces the rank's older stream, and waits until that one has finished adding.
  virtual Pending OpenStream(OpenStreamRequest request, std::shared_ptr<RankListener> listener,
                             Done<std::unique_ptr<RankStream>> done) = 0;
  absl::StatusOr<std::unique_ptr<RankStream>> OpenStream(const OpenStreamRequest& request,
                                                         std::shared_ptr<RankListener> listener);

  // Memory that the rank's holder shares with this process: admitted first, then given. The rank
  // has it until it is dropped, another process takes the rank, the generation rises or the job is
  // closed. If the step in progress still reads gradients from it, it stays until that is over. A
  // new one replaces the old one. RESOURCE_EXHAUSTED: the budget has no room.
  virtual absl::StatusOr<MemoryBudget::Reservation> ReserveRankMemory(int rank) = 0;
  // ABORTED: another process holds the rank. FAILED_PRECONDITION: the rank is in the middle of a
  // step. Waits for a decision and update in progress, on the caller's thread.
  virtual absl::Status GiveRankMemory(const RankHolder& holder,
                                      std::shared_ptr<const RankMemory> memory) = 0;
  // Its process has released it. No effect if the rank has another memory now.
  virtual void DropRankMemory(int rank, const RankMemory* memory) = 0;

  // Uploads a rank's first weights, with a certain state.
  struct Uploader {
    Generation generation;
    std::string process_id;
    uint64_t state = 0;    // The job's number for it.
    uint64_t session = 0;  // The rank's number.
    bool moments = false;
  };
  // Every rank calls it before its first weights, with the same state. FAILED_PRECONDITION: weights
  // have arrived with another state. ABORTED: the holder does not have the rank.
  virtual absl::StatusOr<Uploader> BeginFirstWeights(const RankHolder& holder,
                                                     FirstState state) = 0;
  // First weights of one chunk: chunk.elements fp32 values in pieces cut anywhere. With moments as
  // many values of each further plane of the group follow (PlanesOf). Padding must be zero. The job
  // is ready when every chunk has arrived; then it returns true. ABORTED: an uploader is given that
  // does not have the chunk's rank any more. FAILED_PRECONDITION: another rank has begun with another
  // state since. If another process or session takes a rank, its weights are dropped; if the
  // generation rises, all ranks' are.
  virtual absl::StatusOr<bool> WriteInitialWeights(
      int64_t chunk, absl::Span<const absl::Span<const std::byte>> payload,
      const std::optional<Uploader>& uploader = std::nullopt) = 0;

  // Writes planes of parameters between two steps. All ranks write alike: each begins its part,
  // sends its chunks that hold any of it, and ends it. Nothing shows before the last part has
  // ended. Then the write is the committed state, and each Done gets true. If a rank begins the
  // next step earlier, it is refused. A part is given up (ABORTED) if its Pending is cancelled,
  // another process or session takes the rank, or the generation rises. The step before cannot be
  // undone afterwards. FAILED_PRECONDITION: another step, or another rank has begun the next one or
  // writes something else (OTHER_SETTINGS). INVALID_ARGUMENT: an invalid write; values that no
  // update leaves. RESOURCE_EXHAUSTED: no memory for the values until all have arrived.
  struct StateWriter {
    int rank = 0;
    uint64_t id = 0;  // 0: the write is already the job's state.
  };
  virtual absl::StatusOr<StateWriter> BeginStateWrite(const RankHolder& holder,
                                                      StateWrite write) = 0;
  // chunk.elements fp32 values for each of the planes, in pieces cut anywhere.
  virtual absl::Status WriteStateChunk(const StateWriter& writer, int64_t chunk,
                                       absl::Span<const absl::Span<const std::byte>> payload) = 0;
  virtual Pending EndStateWrite(const StateWriter& writer, Done<bool> done) = 0;
  // Gives the part up, unless the write is already the job's state.
  virtual void DropStateWrite(const StateWriter& writer) = 0;
  // The same by an operator, with `number` 0 and without update counts, whatever the ranks do. The
  // caller fills the prepared write, and it becomes the state once no step is in progress. Trainers
  // get written weights with those of the next step. Done: the step before it.
  virtual absl::StatusOr<std::unique_ptr<StateWriting>> PrepareStateWrite(StateWrite write) = 0;
  virtual Pending CommitStateWrite(std::shared_ptr<StateWriting> writing, Done<uint64_t> done) = 0;

  // The weights of a chunk at `step` in its group's return dtype, into chunk.elements elements at
  // `out`. ABORTED: another generation. UNAVAILABLE: the chunk is being updated.
  // FAILED_PRECONDITION: the chunk is at another step.
  virtual absl::Status ReadShard(Generation generation, uint64_t step, int chunk,
                                 absl::Span<std::byte> out) = 0;

  // The directions of a chunk of a rule with two rounds, in bf16, into chunk.elements elements at
  // `out`; zeros for what the round does not update. FAILED_PRECONDITION (OTHER_STEP): no rank is
  // to orthogonalize those of that step.
  virtual absl::Status ReadDirections(uint64_t step, int chunk, absl::Span<std::byte> out) = 0;
  // The same into the memory that is shared with the rank, in the place for weights, which the next
  // weights replace. False: none is shared with that holder.
  virtual absl::StatusOr<bool> ShareDirections(uint64_t step, int chunk,
                                               const std::string& process_id) = 0;
  // By group: with which values ranks orthogonalize them. FAILED_PRECONDITION as ReadDirections.
  virtual absl::StatusOr<std::vector<HyperParameters>> ValuesOfDirections(uint64_t step) = 0;
  // What Newton-Schulz has made of them: O of that chunk, in bf16, in pieces cut anywhere; without
  // pieces it lies in the place for gradients of the memory that is shared with the rank. The last
  // one of all ranks begins the round. If the generation rises before, all ranks give theirs again.
  // Repeating it is OK, also after the step. ABORTED: another generation or holder.
  // INVALID_ARGUMENT: another rank's chunk, a wrong size. UNAVAILABLE: another call is giving the
  // chunk, or no memory is shared. FAILED_PRECONDITION (OTHER_STEP): the job is at another step.
  virtual absl::Status GiveOrthogonal(const RankHolder& holder, uint64_t step, int64_t chunk,
                                      absl::Span<const absl::Span<const std::byte>> payload) = 0;

  // Tells every sealed rank of an open step, through OnWaiting, which ranks it waits for. While
  // votes are awaited, it tells every rank that has voted. The server calls it repeatedly after the
  // seal deadline.
  virtual void TellWaiting() = 0;
  // The time since the first rank sealed the step in progress; nullopt: none has.
  virtual std::optional<double> SecondsSinceFirstSeal() const = 0;

  // Returns the aborted step. Raises the generation, so every rank attaches again and repeats the
  // step. Or decides it as a skip, if all ranks have begun it and the job says so (OnAbort). In a
  // second round that waits for ranks the service orthogonalizes instead of them. FAILED_PRECONDITION
  // if no step has begun, or it is decided.
  virtual Pending AbortStep(Done<uint64_t> done) = 0;
  absl::StatusOr<uint64_t> AbortStep();
  // Undoes the last committed step and returns its number. State, update counts, hyper-parameters,
  // the trainer's state and the recent steps become those before it, bit for bit. For a skipped
  // step only its number and the last three change. Later changes of hyper-parameters by operators
  // (UpdateGroup) stay. Raises the generation, so every rank attaches again and continues from the
  // step before. Waits for readers. FAILED_PRECONDITION: the job does not keep the previous version
  // (JobSpec::keep_previous), a step is in progress, or no step can be undone. Only one step can be
  // undone, and none from before a load. A request with step and generation may be repeated, and
  // gets the same answer. If the job is at another step: FAILED_PRECONDITION.
  struct UndoRequest {
    uint64_t step = 0;  // 0: the last one, whichever it is.
    Generation generation;
  };
  virtual Pending UndoStep(UndoRequest request, Done<uint64_t> done) = 0;
  absl::StatusOr<uint64_t> UndoStep(const UndoRequest& request);
  absl::StatusOr<uint64_t> UndoStep() { return UndoStep(UndoRequest()); }
  // From the next BeginStep on. Returns the new values.
  virtual absl::StatusOr<HyperParameters> UpdateGroup(int group,
                                                      const HyperParameterOverrides& changes) = 0;

  // A consistent view of some parameters' state at the committed step; see snapshot.h.
  virtual Pending TakeSnapshot(std::vector<int> parameters, Done<Snapshot> done) = 0;
  absl::StatusOr<Snapshot> TakeSnapshot(absl::Span<const int> parameters);

  // Writes a new checkpoint (checkpoint.h) of the committed step into a folder
  // (checkpoint_folder.h), on the engine's threads, while steps and everything else go on. Chunks
  // that are updated meanwhile go to second versions. A save replaces nothing. Once it is complete,
  // surplus checkpoints of this job are deleted (CheckpointPolicy). If the budget has no room for
  // second versions, the next decision waits for the save. Waits for a running update. If it is
  // cancelled while it waits, or before its first byte, it frees its memory; later it continues to
  // its end. RESOURCE_EXHAUSTED: kMostSaves of the job are in progress.
  //
  // With several members the lead saves, in its CheckpointDirectory; FAILED_PRECONDITION: a member
  // does not see the folder, or it is elsewhere. At another member a scheduled save is the lead's;
  // FAILED_PRECONDITION (OTHER_MEMBER_LEADS) for others, and for loads. UNAVAILABLE, ABORTED: a
  // member has had no link, or has gone on; try again.
  struct SaveRequest {
    std::string folder;
    bool asked_for = true;    // False: a scheduled save.
    bool background = false;  // Done when the versions are pinned; a later failure only warns.
  };
  virtual Pending Save(SaveRequest request, Done<CheckpointInfo> done) = 0;
  absl::StatusOr<CheckpointInfo> Save(const std::string& folder);
  // Replaces state, update counts, hyper-parameters, the trainer's state and the committed step by
  // a checkpoint's: that of `path`, or the newest undamaged one in it (OpenNewest). Then only its
  // last step is in the recent steps. Runs on an engine's thread.
  struct LoadRequest {
    std::string path;
    bool weights_only = false;  // Checkpoint::OpenWeights: the job restarts with these weights.
    // State in another format than the job's is converted. false: FAILED_PRECONDITION.
    bool convert_state = false;
  };
  virtual Pending Load(LoadRequest request, Done<CheckpointInfo> done) = 0;
  absl::StatusOr<CheckpointInfo> Load(const std::string& path, bool weights_only = false);
  // Records a timeline of the next `steps` steps (trace.h), and returns it when the last of them is
  // committed. It returns earlier, with the events so far, when the job is closed, or once
  // `still_wanted`, called from time to time, returns false. RESOURCE_EXHAUSTED during another
  // trace. Blocks its thread.
  virtual absl::StatusOr<Trace> TraceSteps(uint32_t steps,
                                           const std::function<bool()>& still_wanted) = 0;
  // For all code that takes part in a step.
  virtual TraceRecorder& trace() = 0;
  // The job's name has gone on elsewhere, in this later epoch: its host was taken for dead. From now on
  // this part serves nothing, in later processes too. Closed here, it frees its memory. Done: true if
  // that is new. Waits for a decision and update in progress.
  virtual Pending Supersede(uint64_t epoch, Done<bool> done) = 0;
  virtual bool is_superseded() const = 0;
  // ---- With several members (members/words.h)
  // While it is created: whom that waits for, in a line; empty: no other member.
  virtual std::string CreationWaitsFor() const = 0;
  // The lead has a link to a member, or a member to the lead, and sends words by `sink`. It replaces
  // an older one. Returns its number.
  virtual uint64_t OpenLinkToMember(int member, std::shared_ptr<WordSink<LeadWord>> sink) = 0;
  virtual uint64_t OpenLinkToLead(std::shared_ptr<WordSink<MemberWord>> sink) = 0;
  virtual void CloseLink(uint64_t number, const absl::Status& why) = 0;
  // A message by a link, and its answer, took this long.
  virtual void NoteRoundTrip(uint64_t link, double seconds) = 0;
  // For a lead that opens a link.
  virtual Follow FollowOf(int member) const = 0;
  virtual void CannotReach(int member, const absl::Status& why) = 0;
  // A word has come by this link. Those of older links do nothing.
  virtual void HearMember(int member, uint64_t link, MemberWord word) = 0;
  virtual void HearLead(uint64_t link, LeadWord word) = 0;

  // SHA-256 in hex over the update counts and every element of every plane, by parameter. It is the
  // same for any world size, and a skipped step does not change it. Waits for a decision and update
  // in progress, on the caller's thread. Empty if the job is closed or torn.
  virtual std::string StateHash() = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_JOB_H_
