// The library that a trainer links: one rank's session with its job on a Ballast service.
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
// A trainer that looks at the norm first, to clip by it or to skip the step, seals without a vote:
//
//     StepNorm norm = session->Seal(micro_steps).value();
//     client::StepDecision decision = session->Vote({.apply = norm.norm < 10}).value();
//
// A step may be repeated: Discard takes back what this rank has given, and BeginStep begins the
// next attempt. All ranks have to discard equally often, each at any time, before one can seal.
//
// Threads: Push may be called from any thread. The other calls come from one thread at a time, in
// the order above. The session owns one stream and two threads. It borrows payloads until they are
// released, at the latest by its destructor, which waits for that. It borrows the memory that
// `weights` returns until it is destroyed. The destructor wakes a waiting Push, which returns
// CANCELLED, and waits for its return. No other call may be running, and none may begin. Callbacks
// must not call into the session.
//
// Lost steps: with OnAbort::kSkip a lost step may end as a skipped one at any time after all ranks
// have begun it. Later pushes of it are released, Seal returns the decision, and the session goes
// on. Sessions of other jobs then end with ABORTED.
//
// Errors: a stream that breaks is reopened, and no call notices. Open, UploadWeights, ReadWeights,
// ReadCounts and UndoStep are retried while they return UNAVAILABLE, for at most reconnect_timeout.
// Saving and loading a checkpoint are not retried, because they are not idempotent. The session
// keeps the first error that it cannot repair, and every later call returns it. Then open another
// session.
//
// Such an error between steps does not affect other ranks. In a step that the rank has begun it
// raises the generation, so that earlier messages are dropped. An aborted or undone step, a loaded
// checkpoint and another process that takes a rank raise it too. Each raise ends the sessions of
// all ranks: every later call returns ABORTED. Then every rank opens its session again, which
// returns the job's committed step.
//
// If a service hangs, the stream breaks within 40 seconds over TCP. Over a unix socket it breaks
// only if the service's process ends.
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
  // Unique to this process, and the same for all its sessions. Empty: made from the host's name,
  // the process id and random bits.
  std::string process_id;
  // This process had a session of this rank before. If another process has taken the rank since:
  // FAILED_PRECONDITION. With false the rank is taken from the process that has it.
  bool rejoin = false;
  // The job that this process joined before. If the service does not have it: NOT_FOUND, and no job
  // is created, even if another job has its name. Empty: any job of this name, or a new one.
  std::string job_uid;
  // The uid of another job with the same name. This job continues from its state, with other
  // parameters. Parameters of the same name and shape keep weights, moments and update counts;
  // UploadWeights sends the others. All ranks give the same uid, with an empty job_uid. Once the
  // weights of all ranks have arrived, the new job replaces the other one atomically. Until then
  // both exist, with the memory of both. NOT_FOUND: the other job is gone or has changed meanwhile:
  // derive again.
  std::string derive_from_uid;
  // The state comes from this checkpoint, or from the newest of a folder (LoadCheckpoint), instead
  // of that job. If derive_from_uid is empty and a job has the name: FAILED_PRECONDITION.
  std::string derive_from_checkpoint;
  // How long rank 0 tries to create the job, and other ranks wait; 1 s more for each 16 Mi
  // elements.
  absl::Duration join_timeout = absl::Seconds(60);
  // Where the weights of a chunk of this rank go: chunk.elements elements of the group's return
  // dtype. Called from a thread of the session, which writes there between Seal and the return of
  // ReceiveWeights; in ReadWeights from the caller's thread. Null: weights are read in place, from
  // Session::weights_memory, without a copy.
  std::function<absl::Span<std::byte>(int chunk)> weights;
  // Called from the same thread when a chunk's weights are complete. May be null.
  std::function<void(int chunk)> on_weights;
  // For null `weights`. Called from a thread of the session, one call at a time, on_weights
  // included. May be null. on_provisional_weights: before the decision, Session::weights_memory has
  // the chunk's provisional weights. They become the step's when on_weights is called. They become
  // void when on_dropped_weights is called: other weights will be written there.
  std::function<void(int chunk)> on_provisional_weights;
  std::function<void(int chunk)> on_dropped_weights;
  // Unacknowledged payload bytes at which Push blocks.
  int64_t window_bytes = int64_t{64} << 20;
  // How long Push waits for room in the window, Seal for the decision, and ReceiveWeights for the
  // end of the step. The error of Seal names the ranks that have not sealed.
  absl::Duration seal_timeout = absl::Minutes(10);
  // How long the session tries to reopen a broken stream before it fails with UNAVAILABLE: about
  // once a second, from the end of the stream on. A reopened stream continues after the service's
  // acknowledgements, and the trainer does not notice. Streams that break within a second, with
  // nothing acknowledged, count as one outage.
  absl::Duration reconnect_timeout = absl::Seconds(60);
  // Memory shared with a service on the same host. Gradients written to Session::gradient_memory
  // and weights read from Session::weights_memory are not copied, and only small messages use the
  // channel. kAuto: if service and system allow it. Otherwise everything uses the channel, with the
  // same bits.
  SharedMemoryUse shared_memory = SharedMemoryUse::kAuto;
  // False: the session is only for uploading weights, counts and checkpoints. It shares and
  // reserves no memory, and ReadWeights and BeginStep return FAILED_PRECONDITION.
  bool takes_steps = true;
  // Without shared memory the session reserves memory for this rank's partition in its return
  // dtypes, if `weights` is null or job.update_mode is kSpeculate. If memory is short: without
  // `weights` Open returns RESOURCE_EXHAUSTED; with it, the log says so, and this rank's chunks
  // wait for the decision.
};

// The sum over ranks and over micro-steps [micro_step_begin, micro_step_end) of a chunk's gradient.
struct GradientPush {
  int chunk = 0;
  uint32_t micro_step_begin = 0;
  uint32_t micro_step_end = 1;
  bool final = false;  // This is the chunk's last push of the step.
  // This may be the chunk's last push. It lets the service begin the update before the decision. A
  // further push for the chunk undoes the update.
  bool may_guess = false;
  bool empty = false;  // No gradient for any of its elements; no payload.
  // chunk.elements elements of the group's wire dtype, in gradient_memory(chunk) or elsewhere.
  absl::Span<const std::byte> payload;
  // Called exactly once, from any thread, possibly the caller's before Push returns. So the caller
  // must not hold a lock that `released` takes. May be null. It is called
  // - when the service has the payload, or the session has failed, and gRPC no longer uses it;
  // - when Push returns an error.
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

// The service's counts since the job was created.
struct JobCounts {
  uint64_t applied_steps = 0;
  uint64_t skipped_steps = 0;
  uint64_t not_kept_steps = 0;  // Skipped steps that were lost (OnAbort::kSkip).
  // Decided with every micro-step of every chunk: all except not_kept_steps.
  uint64_t coverage_complete_steps = 0;
  int64_t speculated_chunks = 0;
  int64_t published_chunks = 0;
  int64_t redone_chunks = 0;
};

// After ABORTED (an abort, a new process in another rank, a load) the session is unusable. The
// trainer destroys it, opens another with the same process_id, reads the committed weights and
// repeats the step.
class Session {
 public:
  // Creates or joins the job, takes the rank, opens the stream. If the job has members, the channel
  // leads to the rank's home (client/home.h). Errors:
  //   FAILED_PRECONDITION  the job has another description; the message has the first difference
  //   NOT_FOUND            the job has another uid than job_uid
  //   RESOURCE_EXHAUSTED   the job does not fit
  //   UNAVAILABLE          the service does not answer
  //   DEADLINE_EXCEEDED    rank 0 did not create the job in time
  // Use an in-process channel only while its server exists: otherwise gRPC crashes in a later call.
  static absl::StatusOr<std::unique_ptr<Session>> Open(std::shared_ptr<grpc::Channel> channel,
                                                       SessionOptions options);
  virtual ~Session() = default;  // Closes the stream; the job stays.
  // Closes the job of this uid and deletes all its state. NOT_FOUND if its name belongs to another
  // job.
  static absl::Status CloseJob(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& job, const std::string& uid);
  // Deletes checkpoints of SaveCheckpoint: "gpt/step-1000.2", or all of a step, "gpt/step-1000".
  // With a uid it deletes only that job's. NOT_FOUND: there are none. FAILED_PRECONDITION, and
  // nothing is deleted, while one is being saved, loaded or verified.
  static absl::Status DeleteCheckpoint(const std::shared_ptr<grpc::Channel>& channel,
                                       const std::string& checkpoint, const std::string& uid = "");

  // Of this rank alone (Layout::CreateForRanks). A chunk's name is its index in it.
  virtual const Layout& layout() const = 0;
  virtual bool awaiting_weights() const = 0;
  virtual uint64_t committed_step() const = 0;
  virtual Generation generation() const = 0;
  virtual const std::string& job_uid() const = 0;
  // About the last committed step when the session was opened: the trainer's state, and whether it
  // was applied (true also if there was no step).
  virtual const std::string& trainer_state() const = 0;
  virtual bool last_step_applied() const = 0;
  // NOT_FOUND if the job's name now belongs to another job.
  virtual absl::StatusOr<JobCounts> ReadCounts() = 0;

  // Whether this process and the service share memory.
  virtual bool shares_memory() const = 0;
  // Where to write a chunk's gradient so that Push of exactly these bytes copies nothing: its
  // elements in the wire dtype, 64-byte aligned. Empty if no memory is shared. Pushes of other
  // memory use the channel. May be called from any thread. The bytes belong to the trainer until
  // they are pushed, and again once that push is released. After a final push they belong to the
  // trainer from the next BeginStep on. In a job with newton_schulz kWorkers the session keeps O
  // there from GiveOrthogonal on. They live as long as the session.
  virtual absl::Span<std::byte> gradient_memory(int chunk) = 0;
  // With null SessionOptions::weights: a chunk's weights in the return dtype. Valid from on_weights
  // (or the return of ReceiveWeights or ReadWeights) until the chunk's final (or may_guess) push in
  // the next step. After that push other weights may be written there. So they are not valid after
  // a skipped step. Empty otherwise. May be called from any thread;
  // the places are constant for the session.
  virtual absl::Span<const std::byte> weights_memory(int chunk) const = 0;

  // Sends the first weights of this rank's chunks: `fill(chunk, out)` writes chunk.elements fp32
  // values, with zeros in the padding. After a broken connection `fill` may be called again for a
  // chunk, and must write the same values. Returns when the service has all weights.
  virtual absl::Status UploadWeights(
      const std::function<void(int chunk, absl::Span<float> out)>& fill) = 0;
  // The same with moments: the job begins at state.step, with the state of another optimizer. For
  // each chunk `fill` writes its weights and then each further plane of its group (PlanesOf in
  // common/rule.h), chunk.elements values each. All ranks call it with the same
  // state. FAILED_PRECONDITION: another rank gave another state.
  virtual absl::Status UploadState(
      const FirstState& state,
      const std::function<void(int chunk, absl::Span<float> out)>& fill) = 0;
  // Writes planes of parameters between two steps. All ranks give the same write; its `step` and
  // `number` are filled in here. For each chunk that holds any part of it `fill` writes
  // chunk.elements values of each of write.planes, one plane after the other. Values of other
  // parameters are ignored. `fill` may be called again, as above. Returns when all ranks' parts
  // have arrived and the write is the job's state. The weights in the trainer's memory do not
  // change. The step before cannot be undone afterwards. FAILED_PRECONDITION (OTHER_SETTINGS):
  // another rank writes something else, or has begun the next step. INVALID_ARGUMENT: a value is
  // not finite, or one of exp_avg_sq, max_exp_avg_sq or sum is negative. RESOURCE_EXHAUSTED: the values do
  // not fit beside the state. DEADLINE_EXCEEDED, after `timeout`: the message names the missing
  // ranks.
  virtual absl::Status WriteState(
      StateWrite write, absl::Duration timeout,
      const std::function<void(int chunk, absl::Span<float> out)>& fill) = 0;
  // Reads the committed weights of this rank's chunks into place. Waits, up to join_timeout, for
  // other ranks' first weights.
  virtual absl::Status ReadWeights() = 0;
  // The service saves to, or loads from, a directory: a name under its --checkpoint-dir, or an
  // absolute path on its host if it accepts paths from this caller. Empty: the job's name. A save
  // makes a new checkpoint there, step-STEP.GENERATION, and replaces none. A load takes the newest
  // undamaged one, or the named one, "gpt/step-1000.2". A load ends the sessions of all ranks,
  // including this one: later calls return ABORTED, and every rank opens its session again. After
  // UNAVAILABLE it is unknown whether the service has done it.
  virtual absl::Status LoadCheckpoint(const std::string& directory) = 0;
  virtual absl::Status SaveCheckpoint(const std::string& directory) = 0;
  // Undoes the last committed step of a job with JobSpec::keep_previous, exactly, and returns its
  // number. Like a load it ends the sessions of all ranks; reopened sessions are at the step
  // before. FAILED_PRECONDITION: a rank has begun the next step; the job does not keep the state
  // before; or no step can be undone, because only one can. UNAVAILABLE: the service has not come
  // back within reconnect_timeout. Then committed_step of the reopened session shows whether the
  // step was undone.
  virtual absl::StatusOr<uint64_t> UndoStep() = 0;

  // Begins step committed_step() + 1. After Discard it begins the next attempt, which may have
  // other settings.
  virtual absl::Status BeginStep(const StepSettings& settings) = 0;
  // Blocks while the window is full. DEADLINE_EXCEEDED names the chunk and its micro-step: it was
  // not sent, and may be pushed again.
  virtual absl::Status Push(GradientPush push) = 0;
  // For a trainer with a pushing thread that must end before the session is destroyed. A waiting
  // Push returns CANCELLED, and so do later pushes, seals and votes. From any thread.
  virtual void EndPushes() = 0;
  virtual absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) = 0;
  // For people who look at the job: goes with the next Seal or Vote, together with earlier reports.
  // At the next BeginStep the reports of a sealed step are dropped. A report affects no decision,
  // and may differ between ranks. The lowest rank that reports numbers counts. A number of the same
  // name replaces an earlier one, and so do seconds. INVALID_ARGUMENT, without effect: a name is
  // not 1 to 64 letters, digits, '.', '_', '/' and '-', or there would be more than 16.
  virtual absl::Status Report(const RankReport& report) = 0;
  // Waits for all ranks and returns the norm of their gradients. The step is undecided until they
  // Vote. The norm has the first 64 unused parameters. FAILED_PRECONDITION: the seal was refused,
  // and the step is still open. The message names worker, micro-step and parameters. Send what is
  // missing and seal again. FAILED_PRECONDITION with the reason DISCARD_AND_REDO (common/reason.h):
  // the rank in the message has discarded this attempt. Discard it too, and repeat the step.
  // DEADLINE_EXCEEDED names the ranks that have not sealed. This rank's seal stays; call Seal again
  // to continue waiting.
  virtual absl::StatusOr<StepNorm> Seal(uint32_t micro_steps) = 0;
  // After Seal has returned the norm. Waits for the votes of all ranks. FAILED_PRECONDITION with
  // the reason VOTE_AGAIN: they differ, the message has the first difference, and all vote again.
  // With DISCARD_AND_REDO: as in Seal. DEADLINE_EXCEEDED names the ranks that have not voted. This
  // rank's vote stays; call Vote again to continue waiting. INVALID_ARGUMENT, and nothing is sent:
  // the clipping is invalid.
  virtual absl::StatusOr<StepDecision> Vote(const StepVote& vote) = 0;
  // Both at once, without the norm and its round trip; errors of both. After VOTE_AGAIN it votes
  // again.
  virtual absl::StatusOr<StepDecision> Seal(uint32_t micro_steps, const StepVote& vote) = 0;
  // Takes back everything that this rank has given in its attempt at the step. Allowed also after a
  // Seal without a decision. It counts even if the attempt has not begun, so that ranks that
  // discard at the same place in their programs agree. Returns when the service has dropped the
  // gradients: they are released, on_dropped_weights has been called, and no step is open until
  // BeginStep. Pushes from other threads meanwhile are dropped, too. If the job speculates, weights
  // that are read in place (null `weights`) become invalid; ReadWeights restores them.
  // FAILED_PRECONDITION: the step is decided; receive its weights. DEADLINE_EXCEEDED: the discard
  // is on its way; call Discard again to continue waiting, before any other call of the step.
  virtual absl::Status Discard() = 0;
  // In a job with newton_schulz kWorkers, after each applied decision and before ReceiveWeights. Waits
  // for the directions of this rank's chunks of matrices, and calls place(chunk, direction) for
  // each, from this thread: chunk.elements values in bf16. Ranks put matrices together from their
  // chunks, orthogonalize them, and give back what becomes of each chunk. Returns the step's
  // hyper-parameters, by group: O is made with them. Empty: nothing is to be given, because the step
  // changes no matrix, or an operator has ended the round.
  virtual absl::StatusOr<std::vector<HyperParameters>> ReadDirections(
      const std::function<void(int chunk, absl::Span<const std::byte> direction)>& place) = 0;
  // O: calls fill(chunk, out) for each of those chunks, which writes chunk.elements values in bf16.
  // Returns when the service has them. Until ReceiveWeights returns the session keeps a copy, with
  // shared memory in gradient_memory, and gives it again to a service that has lost it.
  virtual absl::Status GiveOrthogonal(
      const std::function<void(int chunk, absl::Span<std::byte> out)>& fill) = 0;
  // Not 0: the directions of this step are to be orthogonalized. If it is so when a session was
  // opened, the rank reads them, gives O and receives weights before anything else. Then
  // committed_step() is the step.
  virtual uint64_t directions_step() const = 0;
  // Returns when this rank's chunks of the decided step are in place and all ranks' chunks are at
  // it. After a skipped step it returns as soon as the step is committed.
  virtual absl::Status ReceiveWeights() = 0;
  // Returns when the weights of these chunks of this rank are in place, in the decided step. Others
  // may still arrive. For a trainer that begins its next forward with the first ones.
  // ReceiveWeights is still needed to end the step. FAILED_PRECONDITION: no step is decided. Other
  // errors as in ReceiveWeights.
  virtual absl::Status AwaitWeights(absl::Span<const int> chunks) = 0;
  // For the last received step: the service's time from decision to last updated chunk. 0 if the
  // stream broke before this arrived.
  virtual double update_seconds() const = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_H_
