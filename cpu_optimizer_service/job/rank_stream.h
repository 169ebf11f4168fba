// A rank's way into its job: RankStream carries what the rank gives, RankListener what it is told.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_RANK_STREAM_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_RANK_STREAM_H_

#include <cstddef>
#include <cstdint>
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

// One piece of gradient: chunk `chunk`'s elements, summed over ranks and micro-steps
// [micro_step_begin, micro_step_end), in the group's wire dtype. The payload may come in pieces,
// cut anywhere. Empty contributions have no payload and count as zeros. After a final one nothing
// more is taken for the chunk in this step. One that may_guess is as good as final for a provisional
// update, and promises nothing: a further one drops that.
//
// One that is `in_place` has no payload either: it lies at its place in the rank's memory. If it is
// final and the chunk's first of the step, it is read from there until the step is over, and must
// not change; otherwise it has been read when Contribute returns.
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
// kDiscarded: it came late, of an attempt that its rank has discarded or of a step that could not
// be kept (OnAbort::kSkip), and was dropped.
enum class ContributionResult : uint8_t { kAdded, kRepeat, kDiscarded };

class RankListener {
 public:
  virtual ~RankListener() = default;
  // The calls of one step come in this order; OnWeights once for each chunk of the rank's
  // partition that has not come provisionally and stayed, in no order, and not at all when the step
  // is skipped. OnWaiting alone may come late.
  virtual void OnWaiting(uint64_t step, const std::vector<int>& ranks) = 0;
  // A seal of this rank that was taken at first has been undone: at the last rank's seal the step
  // was not whole, or another rank has discarded the attempt. The step is open; each rank sends
  // what is missing, or discards too, and all seal again. Of an attempt that this rank has
  // discarded since it may come late, and means nothing.
  virtual void OnSealRefused(uint64_t step, const SealRefusal& refusal) = 0;
  // Every rank has sealed, and this one has not voted: its vote is awaited. It may come twice.
  virtual void OnNorm(const StepNorm& norm) = 0;
  // The votes of all ranks are void, because they differ: the status names the first difference.
  // The step stays sealed, and all vote again; or, to this rank alone, another one has discarded
  // the attempt.
  virtual void OnVoteRefused(StepAttempt at, const absl::Status& why) = 0;
  // Weights of the next step, should it be decided as it was begun: before OnDecision. Later ones
  // of a chunk take the place of earlier ones. Only if the stream was opened to speculate.
  virtual void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer shard) = 0;
  // Of the provisional weights told to this listener, those of `dropped_chunks` are not the step's
  // (they follow through OnWeights); the others are, and do not come again. Of a skipped step none
  // is.
  virtual void OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) = 0;
  // `shard` is null when the pool was empty: the listener calls Job::ReadShard when it can send.
  virtual void OnWeights(uint64_t step, int chunk, WeightBuffer shard) = 0;
  virtual void OnCommitted(uint64_t step, double update_seconds) = 0;
  // The stream is no longer the rank's: ABORTED (replaced, older generation, closed job). Of what
  // was on its way, OnWaiting, OnSealRefused, OnNorm, OnVoteRefused, OnProvisionalWeights and
  // OnCommitted may still come.
  virtual void OnDetached(const absl::Status& status) = 0;
};

struct ChunkProgress {
  int chunk = 0;
  uint32_t next_micro_step = 0;
};

// Where a rank stands, for a stream that is opened in mid-step.
struct RankPosition {
  Generation generation;
  uint64_t committed_step = 0;
  uint32_t attempt = 0;    // Of the rank, at the next step; those before it are discarded.
  uint64_t open_step = 0;  // 0: the rank has not begun that attempt.
  uint32_t micro_steps_ended = 0;
  std::vector<ChunkProgress> delivered;  // Chunks whose count is not 0.
};

// A rank's way into its job. Every call says ABORTED once the stream has been replaced or the
// generation has risen, and has then done nothing. Destroying it detaches the listener; the step
// stays. What comes late for a step that could not be kept and was skipped is dropped, and OK.
class RankStream {
 public:
  virtual ~RankStream() = default;
  virtual const RankPosition& position() const = 0;  // At opening.

  // FAILED_PRECONDITION: wrong step or attempt, no weights yet, or other settings than the ranks
  // before (the first difference named). Repeating it with the same settings is OK. Ranks need the
  // same settings in the same attempt; in the next one they may be others.
  virtual absl::Status BeginStep(StepAttempt at, const StepSettings& settings) = 0;
  // Verifies all before touching anything. INVALID_ARGUMENT: unknown chunk, not this rank's, wrong
  // size. FAILED_PRECONDITION: wrong step, micro-steps that do not follow on, or beyond
  // max_micro_steps; or the chunk's provisional update is running (StopProvisional). When it
  // returns OK the payload may be reused.
  virtual absl::StatusOr<ContributionResult> Contribute(const Contribution& contribution) = 0;
  // Comes before contributions from `micro_step_begin` on to these chunks, if an earlier one of the
  // attempt may_guess: no provisional update of theirs runs when it is done, until Contribute.
  // Waits for those that run; no other call of the stream may come before its Done. It leaves
  // chunks alone that Contribute would refuse or find to be a repeat. ABORTED, or true.
  virtual Pending StopProvisional(StepAttempt at, uint32_t micro_step_begin,
                                  absl::Span<const int64_t> chunks, Done<bool> done) = 0;
  absl::StatusOr<bool> StopProvisional(StepAttempt at, uint32_t micro_step_begin,
                                       absl::Span<const int64_t> chunks) {
    return Await<bool>(
        [&](Done<bool> done) { StopProvisional(at, micro_step_begin, chunks, std::move(done)); });
  }
  virtual absl::Status EndMicroStep(StepAttempt at, uint32_t micro_step,
                                    const UsedParameters& used) = 0;
  // nullopt: taken. The decision comes through the listener, perhaps before this returns; without a
  // vote, OnNorm comes. A refusal leaves the step open, for this rank as if it had not sealed. An
  // error is a request that can never work (wrong step, zero micro-steps, a vote as for Vote).
  // An attempt that any rank has discarded is never decided: its seals are refused.
  virtual absl::StatusOr<std::optional<SealRefusal>> Seal(StepAttempt at, uint32_t micro_steps,
                                                          const std::optional<StepVote>& vote) = 0;
  // With the vote of a trainer that needs no look at the norm, nor clips.
  absl::StatusOr<std::optional<SealRefusal>> Seal(StepAttempt at, uint32_t micro_steps) {
    return Seal(at, micro_steps, StepVote());
  }
  // Before the seal or the vote that it comes with. It is shown, and nothing is decided by it; what
  // comes late is dropped. INVALID_ARGUMENT: CheckReport.
  virtual absl::Status Report(StepAttempt at, const RankReport& report) = 0;
  // Once the norm is known. The decision or OnVoteRefused comes through the listener, perhaps
  // before this returns. Until all votes are in, a later one takes the place of an earlier one;
  // repeating the same is always OK. INVALID_ARGUMENT: clipping or overrides that can never work.
  // FAILED_PRECONDITION: wrong step or attempt, the norm is not known, or the step is decided
  // otherwise. After an error the rank's vote is what it was.
  virtual absl::Status Vote(StepAttempt at, const StepVote& vote) = 0;
  // Forgets what this rank has given in its attempt at the step, its seal included, and nothing of
  // another rank's; the rank may begin the next attempt. It need not have begun this one. True:
  // done, now or by an earlier call. False: it comes too late, the step is decided.
  // FAILED_PRECONDITION: wrong step, or an attempt that the rank has not come to. Waits for what is
  // being computed from the rank's gradients, and for a norm or a decision that is being made; no
  // other call of the stream may come before its Done. While votes are awaited it opens the step
  // again.
  virtual Pending Discard(StepAttempt at, Done<bool> done) = 0;
  absl::StatusOr<bool> Discard(StepAttempt at) {
    return Await<bool>([&](Done<bool> done) { Discard(at, std::move(done)); });
  }
  // Why it is about to be destroyed, for the log: "its connection broke".
  virtual void EndsBecause(std::string why) = 0;
};

struct OpenStreamRequest {
  std::string uid;
  int rank = 0;
  std::string process_id;
  Generation generation;
  UpdateMode update_mode = UpdateMode::kWait;  // kSpeculate: takes provisional weights.
  // Weights are written to the rank's memory, and the shards that the listener gets say so
  // (WeightBuffer::in_place). FAILED_PRECONDITION if the rank has none.
  bool weights_in_place = false;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_RANK_STREAM_H_
