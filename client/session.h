// What a trainer links to: one rank's session with its job on a Ballast service.
//
//   auto channel = client::Connect("unix:/run/ballast.sock").value();  // client/connect.h
//   client::SessionOptions options{.job = spec, .rank = rank, .weights = where_chunks_go};
//   auto session = client::Session::Open(channel, std::move(options)).value();
//   if (session->awaiting_weights()) session->UploadWeights(first_weights);
//   session->ReadWeights();
//   for (;;) {
//     session->BeginStep({.scale = {.divisors = {...}}});
//     for (uint32_t m = 0; m < micro_steps; ++m) {
//       ... backward; for each of my chunks, as soon as it is reduced:
//       session->Push(
//           {.chunk = c, .micro_step_begin = m, .micro_step_end = m + 1, .payload = bytes});
//       session->EndMicroStep(m, used);
//     }
//     client::StepDecision decision = session->Seal(micro_steps, vote).value();  // Of all ranks.
//     session->ReceiveWeights();  // Returns when all my chunks of the step are in my memory.
//   }
//
// A trainer that looks at the norm first, to clip by it or to leave a step out, seals without a
// vote:
//
//     StepNorm norm = session->Seal(micro_steps).value();
//     client::StepDecision decision = session->Vote({.apply = norm.norm < 10}).value();
//
// A step may be tried again: Discard takes back what this rank has given, and BeginStep begins the
// next attempt. All ranks have to discard as often, each when it likes, before any may seal.
//
// Threads: Push may be called from any thread; the other calls come from one thread at a time, in
// the order above. The session owns one stream and two threads. It borrows payloads until they are
// released (at the latest when it is destroyed, which waits for that), and the memory that
// `weights` returns until it is destroyed. Destroying it wakes a waiting Push, which returns
// CANCELLED, and waits for its return; no other call may be running, and none may begin. Callbacks
// must not call into the session.
//
// Of a job with OnAbort::kSkip, a step that cannot be kept ends as a skipped one at any time after
// all ranks have begun it: what is still pushed of it is released, Seal returns the decision, and
// the session goes on. Other jobs' sessions end with ABORTED then.
//
// Errors: a stream that breaks is reopened, and no call notices. Open, UploadWeights, ReadWeights,
// ReadCounts and UndoStep are tried again while they return UNAVAILABLE, for at most
// reconnect_timeout. Saving and loading a checkpoint are not, because doing them twice is not the
// same as once. The first error that this cannot mend is kept, and every later call returns it;
// then open another session. Between steps that does not affect other ranks. In a step that the
// rank has begun it raises the generation, so that what was sent before is forgotten. Each raise
// (that, an aborted or undone step, a loaded checkpoint, another process that takes a rank) ends
// the sessions of all ranks: every call returns ABORTED from then on, and every rank opens its
// session again, which returns the job's committed step.
//
// A service that no longer answers breaks the stream within 40 seconds over TCP; over a unix socket
// only its death does.
#ifndef BALLAST_CLIENT_SESSION_H_
#define BALLAST_CLIENT_SESSION_H_

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
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/history/rank_report.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace grpc {
class Channel;
}

namespace ballast::client {

enum class SharedMemoryUse : uint8_t { kAuto, kNever };

struct SessionOptions {
  JobSpec job;
  int rank = 0;
  // Unique to this process and the same for all its sessions. Empty: made from the host's name, the
  // process id and random bits.
  std::string process_id;
  // This process had a session of this rank before: FAILED_PRECONDITION if another process has
  // taken the rank since. Otherwise the rank is taken from the process that has it.
  bool rejoin = false;
  // The job that this process joined before. NOT_FOUND, and nothing is created, if the service does
  // not have it, whether or not another job has its name. Empty: any job of this name, or a new
  // one.
  std::string job_uid;
  // The job goes on from the state of another one of the same name, by its uid, with other parameters:
  // those of the same name and shape keep weights, moments and update counts, and UploadWeights sends
  // the others. All ranks say the same, with no job_uid. Once the weights of all ranks are there, the
  // job takes the other one's place, in one act; until then both are there, with the memory of both.
  // NOT_FOUND: that job is not there any more, or has gone on meanwhile: derive again.
  std::string derive_from_uid;
  // The state comes from this checkpoint, or the newest of a folder (LoadCheckpoint), and not from that
  // job. Without derive_from_uid it is FAILED_PRECONDITION if a job has the name.
  std::string derive_from_checkpoint;
  // How long rank 0 tries to create the job, and others wait; 1 s more for each 16 Mi elements.
  absl::Duration join_timeout = absl::Seconds(60);
  // Where the weights of a chunk of this rank go: chunk.elements elements of the group's return
  // dtype. Called from a thread of the session, which writes there between Seal and the return of
  // ReceiveWeights; in ReadWeights, from the caller's thread. Null: weights are read in place, from
  // Session::weights_memory, and nothing is copied.
  std::function<absl::Span<std::byte>(int chunk)> weights;
  // Called from the same thread when a chunk's weights are complete. Nullable.
  std::function<void(int chunk)> on_weights;
  // For `weights` null. Called from a thread of the session, never two calls at once, on_weights
  // included. Nullable. on_provisional_weights: the chunk's provisional weights are in
  // Session::weights_memory, before the decision. They become the step's when on_weights is called,
  // and void when on_dropped_weights is called: then other weights will be written there.
  std::function<void(int chunk)> on_provisional_weights;
  std::function<void(int chunk)> on_dropped_weights;
  // Payload bytes that may be unacknowledged before Push blocks.
  int64_t window_bytes = int64_t{64} << 20;
  // How long Push waits for room in the window, Seal for the decision, and ReceiveWeights for the
  // end of the step. The error of Seal names the ranks that have not sealed.
  absl::Duration seal_timeout = absl::Minutes(10);
  // How long the session tries to reopen a stream that broke before it fails with UNAVAILABLE: about
  // once a second, from the end of the stream on, which is the service's last sign of life. A
  // reopened stream goes on where the service's acknowledgements stop; the trainer does not notice.
  // Streams that break within a second, with nothing acknowledged, count as one outage.
  absl::Duration reconnect_timeout = absl::Seconds(60);
  // Memory shared with a service on the same host: gradients written to Session::gradient_memory
  // and weights read from Session::weights_memory are then not copied, and only small messages go
  // through the channel. kAuto: if service and system allow it; otherwise everything goes through
  // the channel, with the same bits.
  SharedMemoryUse shared_memory = SharedMemoryUse::kAuto;
  // False: the session is only for uploading weights, for counts and for checkpoints. No memory is
  // shared or set aside for it, and ReadWeights and BeginStep return FAILED_PRECONDITION.
  bool takes_steps = true;
  // Without shared memory, if `weights` is null or job.update_mode is kSpeculate, the session sets
  // aside memory for this rank's partition in its return dtypes. If there is not enough: without
  // `weights` Open returns RESOURCE_EXHAUSTED; with it, a line in the log says so and this rank's
  // chunks wait for the decision.
};

// The sum over ranks and over micro-steps [micro_step_begin, micro_step_end) of a chunk's gradient.
struct GradientPush {
  int chunk = 0;
  uint32_t micro_step_begin = 0;
  uint32_t micro_step_end = 1;
  bool final = false;  // Nothing more comes for this chunk in this step.
  // As final, without the promise: lets the service begin the update ahead of the decision, which a
  // further push for the chunk undoes.
  bool may_guess = false;
  bool empty = false;  // No gradient for any of its elements; no payload.
  // chunk.elements elements of the group's wire dtype, in gradient_memory(chunk) or anywhere else.
  absl::Span<const std::byte> payload;
  // Called exactly once, from any thread, possibly the caller's before Push returns; so the caller
  // must not have a lock that `released` takes. Nullable. It is called
  // - when the service has the payload, or the session has failed, and gRPC no longer uses it;
  // - when Push returns an error;
  // - at once, if memory is shared and the payload was copied there. It is not copied if the
  //   trainer has asked for the chunk's place, or if the chunk's previous push is still in use.
  std::function<void()> released;
};

struct StepDecision {
  uint64_t step = 0;
  bool applied = false;
  double norm = 0;
  double clip_coefficient = 1;
  std::string skip_reason;
  std::vector<std::string> unused_parameters;  // The first 64.
};

// What the service has counted since the job was created.
struct JobCounts {
  uint64_t applied_steps = 0;
  uint64_t skipped_steps = 0;
  uint64_t not_kept_steps = 0;  // Skipped ones that could not be kept (OnAbort::kSkip).
  // Decided with every micro-step of every chunk: all but not_kept_steps.
  uint64_t coverage_complete_steps = 0;
  int64_t speculated_chunks = 0;
  int64_t published_chunks = 0;
  int64_t redone_chunks = 0;
};

// After ABORTED (an abort, a new process in another rank, a load) a session cannot be used further:
// the trainer destroys it, opens another with the same process_id, reads the committed weights and
// repeats the step.
class Session {
 public:
  // Creates or joins the job, takes the rank, opens the stream. Errors, never ALREADY_EXISTS:
  //   FAILED_PRECONDITION  the job has another description; the first difference is named
  //   NOT_FOUND            the job is not the one of job_uid
  //   RESOURCE_EXHAUSTED   the job does not fit
  //   UNAVAILABLE          the service does not answer
  //   DEADLINE_EXCEEDED    rank 0 did not create the job in time
  // An in-process channel may be used only while its server exists: gRPC crashes in a later call.
  static absl::StatusOr<std::unique_ptr<Session>> Open(std::shared_ptr<grpc::Channel> channel,
                                                       SessionOptions options);
  virtual ~Session() = default;  // Closes the stream; the job stays.
  // Closes the job of this uid, which forgets all its state. NOT_FOUND if another has its name.
  static absl::Status CloseJob(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& job, const std::string& uid);
  // Deletes what SaveCheckpoint has made: "gpt/step-1000.2", or "gpt/step-1000" for those of the
  // step; with a uid those of that job alone. NOT_FOUND: there is none. FAILED_PRECONDITION, and
  // nothing is deleted: one is being saved, loaded or verified.
  static absl::Status DeleteCheckpoint(const std::shared_ptr<grpc::Channel>& channel,
                                       const std::string& checkpoint, const std::string& uid = "");

  // Chunks are named by their index in it. Of a job with a mesh it has this rank's alone
  // (Layout::CreateForRank).
  virtual const Layout& layout() const = 0;
  virtual bool awaiting_weights() const = 0;
  virtual uint64_t committed_step() const = 0;
  virtual Generation generation() const = 0;
  virtual const std::string& job_uid() const = 0;
  // For the step that was the last committed one when the session was opened: the trainer's state,
  // and whether it was applied (true also if there was no step).
  virtual const std::string& trainer_state() const = 0;
  virtual bool last_step_applied() const = 0;
  // NOT_FOUND if another job has its name now.
  virtual absl::StatusOr<JobCounts> ReadCounts() = 0;

  // Whether this process and the service share memory.
  virtual bool shares_memory() const = 0;
  // Where a chunk's gradient may be written so that Push of exactly these bytes copies nothing: its
  // elements in the wire dtype, 64-byte aligned. Empty if no memory is shared, and while an earlier
  // push of other memory is still there; use any other memory then. May be called from any thread.
  // Once the trainer has asked for a place, the place is the trainer's for the session: pushes of
  // other memory for the chunk go through the channel. The bytes belong to the trainer until they
  // are pushed, and again once that push is released; after a final push only from the next
  // BeginStep on. They live as long as the session.
  virtual absl::Span<std::byte> gradient_memory(int chunk) = 0;
  // With SessionOptions::weights null: a chunk's weights in the return dtype. They are valid from
  // on_weights (or the return of ReceiveWeights or ReadWeights) until the next BeginStep, and after
  // that until the chunk's final (or may_guess) push in that step, when other weights may be written there; so
  // after a skipped step they are not valid. Empty otherwise, and for another rank's chunk. May be
  // called from any thread; the places stay the same for the session.
  virtual absl::Span<const std::byte> weights_memory(int chunk) const = 0;

  // Sends the first weights of this rank's chunks: `fill(chunk, out)` writes chunk.elements fp32
  // values, with zeros in the padding. It must write the same values if it is called again for a
  // chunk, which happens after a connection broke. Returns when the service has them all.
  virtual absl::Status UploadWeights(
      const std::function<void(int chunk, absl::Span<float> out)>& fill) = 0;
  // The same with moments: the job begins at state.step, as another optimizer left it. For each
  // chunk `fill` writes its weights, behind them exp_avg, exp_avg_sq and, in a group with amsgrad,
  // max_exp_avg_sq: PlanesByGroup times chunk.elements values. All ranks call it with the same
  // state. FAILED_PRECONDITION: another rank has given another one. UNIMPLEMENTED: the service is
  // older than this, and takes first weights without moments.
  virtual absl::Status UploadState(
      const FirstState& state,
      const std::function<void(int chunk, absl::Span<float> out)>& fill) = 0;
  // Writes planes of parameters between two steps, in place of what the last one has left: all ranks
  // with the same write, of which `step` and `number` are filled in here. For each chunk that holds
  // any of it `fill` writes chunk.elements values of each of write.planes, one plane behind the
  // other; what is not of those parameters counts for nothing. It may be called again, as above.
  // Returns when all ranks have brought their parts, and the whole is the job's state. What the
  // trainer's memory has of weights stays as it is. The step before cannot be undone any more.
  // FAILED_PRECONDITION (OTHER_SETTINGS): another rank writes something else, or has begun the next
  // step. INVALID_ARGUMENT: a value is not finite, or a square below zero. RESOURCE_EXHAUSTED: the
  // service has no room for the values beside the state. DEADLINE_EXCEEDED, after `timeout`, names
  // the ranks that have brought nothing.
  virtual absl::Status WriteState(
      StateWrite write, absl::Duration timeout,
      const std::function<void(int chunk, absl::Span<float> out)>& fill) = 0;
  // Reads the committed weights of this rank's chunks into place. Waits, up to join_timeout, for
  // other ranks' first weights.
  virtual absl::Status ReadWeights() = 0;
  // The service saves to, or loads from, a directory: a name under its --checkpoint-dir, or, if it
  // takes paths from this caller, an absolute path on its host; empty: the job's name. A save makes
  // a new checkpoint there, step-STEP.GENERATION, and replaces nothing. A load takes the newest that
  // is not damaged, or the one that is named, "gpt/step-1000.2". It ends the sessions of all ranks,
  // this one included: their later calls return ABORTED, and every rank opens its session again.
  // After UNAVAILABLE the service may or may not have done it.
  virtual absl::Status LoadCheckpoint(const std::string& directory) = 0;
  virtual absl::Status SaveCheckpoint(const std::string& directory) = 0;
  // Undoes the last committed step, exactly, of a job with JobSpec::keep_previous, and ends the
  // sessions of all ranks, as a load does; opened again they are at the step before. Returns the
  // undone step. FAILED_PRECONDITION: some rank has begun the next one; the job does not keep the
  // state before; or there is nothing to undo: one step alone can be. UNAVAILABLE: the service has
  // not come back within reconnect_timeout; committed_step of the session that is opened again says
  // whether it had done it.
  virtual absl::StatusOr<uint64_t> UndoStep() = 0;

  // Begins step committed_step() + 1; after Discard, the next attempt at it, which may have other
  // settings.
  virtual absl::Status BeginStep(const StepSettings& settings) = 0;
  // Blocks while the window is full. DEADLINE_EXCEEDED names the chunk and its micro-step: it was
  // not sent, and may be pushed again.
  virtual absl::Status Push(GradientPush push) = 0;
  // For a trainer whose thread pushes, and has to end before the session is destroyed: a Push that
  // waits returns CANCELLED, and so does what is pushed, sealed or voted after it. From any thread.
  virtual void EndPushes() = 0;
  virtual absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) = 0;
  // For people who look at the job: what goes with the next Seal or Vote, beside what was reported
  // before; of a step that was sealed nothing is left at the next BeginStep. Nothing is decided by
  // it, ranks need not report the same, and of those that report numbers the lowest counts. A number
  // of the same name, and other seconds, take the place of earlier ones. INVALID_ARGUMENT, and
  // nothing is kept: a name has other than 1 to 64 letters, digits, '.', '_', '/' and '-', or there
  // would be more than 16.
  virtual absl::Status Report(const RankReport& report) = 0;
  // FAILED_PRECONDITION: the seal was refused and the step is still open; the message names worker,
  // micro-step and parameters. Send what is missing and seal again. DEADLINE_EXCEEDED names the
  // ranks that have not sealed; this rank's seal stays, and another Seal waits further.
  // FAILED_PRECONDITION with the reason DISCARD_AND_REDO (common/reason.h): the rank that the
  // message names has discarded this attempt; Discard it too, and give the step again.
  // Returns what all ranks have given; nothing is decided before they Vote. Unused parameters: the
  // first 64.
  virtual absl::StatusOr<StepNorm> Seal(uint32_t micro_steps) = 0;
  // After Seal has returned the norm. Waits for the votes of all ranks. FAILED_PRECONDITION with
  // the reason VOTE_AGAIN: they differ; the message has the first difference, and all vote again.
  // With DISCARD_AND_REDO: as of Seal. DEADLINE_EXCEEDED names the ranks that have not voted; this
  // rank's vote stays, and another Vote waits further. INVALID_ARGUMENT, and nothing is sent:
  // clipping that can never work.
  virtual absl::StatusOr<StepDecision> Vote(const StepVote& vote) = 0;
  // Both at once, without a look at the norm and without its round trip; errors of both. After
  // VOTE_AGAIN it votes again.
  virtual absl::StatusOr<StepDecision> Seal(uint32_t micro_steps, const StepVote& vote) = 0;
  // Takes back all that this rank has given in its attempt at the step, also after Seal has
  // returned no decision; and counts where nothing has been begun yet, so that ranks that discard
  // at the same place in their programs stay together. Returns when the service has forgotten it:
  // gradients are released then, on_dropped_weights has been called, and no step is open until
  // BeginStep. What other threads push meanwhile goes the same way. Weights that are read in place
  // (`weights` null) are not valid after it if the job speculates; ReadWeights brings them back.
  // FAILED_PRECONDITION: the step is decided; receive its weights. DEADLINE_EXCEEDED: the discard
  // is on its way; another Discard waits further, and no other call of the step may come before.
  virtual absl::Status Discard() = 0;
  // Returns when this rank's chunks of the decided step are in place and all ranks' chunks are at
  // it. After a skipped step it returns as soon as the step is committed.
  virtual absl::Status ReceiveWeights() = 0;
  // Returns when the weights of these chunks of this rank are in place, of the step that is decided;
  // others may still come. For a trainer that begins its next forward with the first ones. The step
  // ends with ReceiveWeights all the same. FAILED_PRECONDITION: no step is decided. Other errors as
  // of ReceiveWeights.
  virtual absl::Status AwaitWeights(absl::Span<const int> chunks) = 0;
  // From decision to last chunk updated, as the service measured it, for the last step received. 0
  // if the stream broke before this arrived.
  virtual double update_seconds() const = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_H_
