// A rank's connection to its job: RankStream takes the rank's input, RankListener gets the job's
// messages.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_RANK_STREAM_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_RANK_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/history/rank_report.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/gradients/weight_buffer.h"
#include "cpu_optimizer_service/job/pending.h"
#include "cpu_optimizer_service/job/step/seal_refusal.h"

namespace ballast {

// A piece of gradient: chunk `chunk`'s elements, summed over ranks and micro-steps
// [micro_step_begin, micro_step_end), in the group's wire dtype. The payload may come in pieces,
// cut anywhere. Empty contributions have no payload and count as zeros. After a final one the chunk
// takes no more in this step. For a provisional update one that may_guess counts as final; a
// further contribution drops that update.
//
// An `in_place` contribution also has no payload: it lies at its place in the rank's memory. If it
// is final and the chunk's first of the step, it is read from there until the step is over, and
// must not change. Otherwise it has been read when Contribute returns.
struct Contribution {
  uint64_t step = 0;
  uint32_t attempt = 0;
  int64_t chunk = 0;
  uint32_t micro_step_begin = 0;
  uint32_t micro_step_end = 1;
  bool final = false;
  bool may_guess = false;
  bool empty = false;
  bool in_place = false;
  absl::Span<const absl::Span<const std::byte>> payload;
};
// kDiscarded: it was late, for a discarded attempt or a lost step (OnAbort::kSkip), and was
// dropped.
enum class ContributionResult : uint8_t { kAdded, kRepeat, kDiscarded };

class RankListener {
 public:
  virtual ~RankListener() = default;
  // The calls of one step come in this order. OnWeights comes once for each chunk of the rank's
  // partition, in any order, except for chunks whose provisional weights stay. It does not come for
  // a skipped step. Only OnWaiting may be late.
  // `why`: what is known of the members that are awaited; empty on one host.
  virtual void OnWaiting(uint64_t step, const std::vector<int>& ranks, const std::string& why) = 0;
  // An accepted seal of this rank has been undone: at the last rank's seal the step was incomplete,
  // or another rank has discarded the attempt. The step is open. Each rank sends what is missing,
  // or discards too, and all seal again. If this rank has discarded the attempt meanwhile, ignore
  // it.
  virtual void OnSealRefused(uint64_t step, const SealRefusal& refusal) = 0;
  // Every rank has sealed, and this one has not voted: its vote is awaited. It may come twice.
  virtual void OnNorm(const StepNorm& norm) = 0;
  // The votes of all ranks are void, because they differ: the status has the first difference. The
  // step stays sealed, and all vote again. Or only this rank gets it, because another one has
  // discarded the attempt.
  virtual void OnVoteRefused(StepAttempt at, const absl::Status& why) = 0;
  // Weights of the next step, if it is decided as it was begun; before OnDecision. Later ones of a
  // chunk replace earlier ones. Only if the stream was opened to speculate.
  virtual void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer shard) = 0;
  // Among this listener's provisional weights those of `dropped_chunks` are void; new ones follow
  // through OnWeights. The others are the step's, and do not come again. For a skipped step all are
  // void.
  virtual void OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) = 0;
  // `shard` is null if the pool was empty: then the listener calls Job::ReadShard when it can send.
  virtual void OnWeights(uint64_t step, int chunk, WeightBuffer shard) = 0;
  // Instead of OnCommitted, if ranks orthogonalize: the rank's directions can be read, and O is
  // awaited (Job::GiveOrthogonal). Weights of matrices, and OnCommitted, come after all have given
  // theirs.
  virtual void OnDirections(uint64_t step) = 0;
  // `left`: StepOutcome's, which was not known at the decision.
  virtual void OnCommitted(uint64_t step, double update_seconds, const std::string& left) = 0;
  // The stream is no longer the rank's: ABORTED (replaced, older generation, closed job).
  // OnWaiting, OnSealRefused, OnNorm, OnVoteRefused, OnProvisionalWeights and OnCommitted may still
  // come late.
  virtual void OnDetached(const absl::Status& status) = 0;
};

struct ChunkProgress {
  int chunk = 0;
  uint32_t next_micro_step = 0;
};

// Where a rank stands, for a stream that opens during a step.
struct RankPosition {
  Generation generation;
  uint64_t committed_step = 0;
  uint32_t attempt = 0;    // The rank's, at the next step; earlier ones are discarded.
  uint64_t open_step = 0;  // 0: the rank has not begun that attempt.
  uint32_t micro_steps_ended = 0;
  std::vector<ChunkProgress> delivered;  // Chunks whose count is not 0.
  // The committed step's second round is outstanding: as after OnDirections. The step's weights come
  // once more, all of them.
  bool awaits_orthogonal = false;
};

// A rank's connection to its job. Once the stream has been replaced or the generation has risen,
// every call returns ABORTED without effect. Its destructor detaches the listener; the step stays.
// Late input for a lost and skipped step is dropped with OK.
class RankStream {
 public:
  virtual ~RankStream() = default;
  virtual const RankPosition& position() const = 0;  // At opening.

  // FAILED_PRECONDITION: wrong step or attempt, no weights yet, or other settings than earlier
  // ranks' (with the first difference). Repeating it with the same settings is OK. Ranks need the
  // same settings in the same attempt; the next attempt may have others.
  virtual absl::Status BeginStep(StepAttempt at, const StepSettings& settings) = 0;
  // Verifies everything before it changes anything. INVALID_ARGUMENT: unknown chunk, another
  // rank's, wrong size. FAILED_PRECONDITION: wrong step, micro-steps out of order or beyond
  // max_micro_steps; or the chunk's provisional update is running (StopProvisional). When it
  // returns OK, the payload may be reused.
  virtual absl::StatusOr<ContributionResult> Contribute(const Contribution& contribution) = 0;
  // Call it before contributions from `micro_step_begin` on to these chunks, if an earlier one of
  // the attempt may_guess. When it is done, none of their provisional updates runs until
  // Contribute. Waits for running ones; no other call of the stream may come before its Done.
  // Ignores chunks that Contribute would refuse or treat as repeated. ABORTED, or true.
  virtual Pending StopProvisional(StepAttempt at, uint32_t micro_step_begin,
                                  absl::Span<const int64_t> chunks, Done<bool> done) = 0;
  absl::StatusOr<bool> StopProvisional(StepAttempt at, uint32_t micro_step_begin,
                                       absl::Span<const int64_t> chunks) {
    return Await<bool>(
        [&](Done<bool> done) { StopProvisional(at, micro_step_begin, chunks, std::move(done)); });
  }
  virtual absl::Status EndMicroStep(StepAttempt at, uint32_t micro_step,
                                    const UsedParameters& used) = 0;
  // nullopt: accepted. The decision comes through the listener, perhaps before this returns;
  // without a vote, OnNorm comes. A refusal leaves the step open, and this rank unsealed. An error
  // is an invalid request (wrong step, zero micro-steps, a vote as for Vote). An attempt that any
  // rank has discarded is never decided: its seals are refused.
  // `refusals_heard`: how many of this stream's OnVoteRefused of the attempt the voter had heard when
  // it voted. If more have been called, the vote is one of the void ones, and is dropped, as in Vote.
  static constexpr uint32_t kAllRefusals = std::numeric_limits<uint32_t>::max();
  virtual absl::StatusOr<std::optional<SealRefusal>> Seal(
      StepAttempt at, uint32_t micro_steps, const std::optional<StepVote>& vote,
      uint32_t refusals_heard = kAllRefusals) = 0;
  // With the vote of a trainer that does not look at the norm and does not clip.
  absl::StatusOr<std::optional<SealRefusal>> Seal(StepAttempt at, uint32_t micro_steps) {
    return Seal(at, micro_steps, StepVote());
  }
  // Before the seal or vote that it belongs to. It affects no decision; late ones are dropped.
  // INVALID_ARGUMENT: CheckReport.
  virtual absl::Status Report(StepAttempt at, const RankReport& report) = 0;
  // Once the norm is known. The decision or OnVoteRefused comes through the listener, perhaps
  // before this returns. Until all votes are in, a later one replaces an earlier one; repeating the
  // same is always OK. INVALID_ARGUMENT: invalid clipping or overrides. FAILED_PRECONDITION: wrong
  // step or attempt, the norm is unknown, or the step is decided otherwise. After an error the
  // rank's vote is unchanged.
  virtual absl::Status Vote(StepAttempt at, const StepVote& vote,
                            uint32_t refusals_heard = kAllRefusals) = 0;
  // Drops what this rank has given in its attempt at the step, including its seal; other ranks'
  // input stays. Then the rank may begin the next attempt. It need not have begun this one. True:
  // done, now or by an earlier call. False: too late, the step is decided. FAILED_PRECONDITION:
  // wrong step, or an attempt that the rank has not reached. Waits for computations of the rank's
  // gradients, and for a norm or decision being made; no other call of the stream may come before
  // its Done. While votes are awaited it opens the step again.
  virtual Pending Discard(StepAttempt at, Done<bool> done) = 0;
  absl::StatusOr<bool> Discard(StepAttempt at) {
    return Await<bool>([&](Done<bool> done) { Discard(at, std::move(done)); });
  }
  // The reason of its coming destruction, for the log: "its connection broke".
  virtual void EndsBecause(std::string why) = 0;
};

struct OpenStreamRequest {
  std::string uid;
  int rank = 0;
  std::string process_id;
  Generation generation;
  UpdateMode update_mode = UpdateMode::kWait;  // kSpeculate: accepts provisional weights.
  // Weights are written to the rank's memory, and the listener's shards say so
  // (WeightBuffer::in_place). FAILED_PRECONDITION if the rank has no memory.
  bool weights_in_place = false;
  // The rank answers OnDirections. FAILED_PRECONDITION without it in a job whose ranks orthogonalize.
  bool orthogonalizes = false;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_RANK_STREAM_H_
