// What the service has answered about the step in progress, and the waits for its next answer. The
// stream's thread writes, the trainer's thread waits.
//
// Thread-safe.
#ifndef BALLAST_CLIENT_SESSION_STEP_PROGRESS_H_
#define BALLAST_CLIENT_SESSION_STEP_PROGRESS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

class StepProgress {
 public:
  // Forgets the previous step, or the attempt at this one that was discarded.
  void Begin(uint64_t step);
  uint64_t step() const { return at().step; }  // 0: no step is open.
  // With the attempt; before the step has begun, the next one.
  StepAttempt at() const;
  // The step is over on this rank.
  void End();

  // True, once, if a seal has to be sent: there is no decision, no seal is in effect, and no norm
  // waits for the caller.
  bool StartSeal(bool with_vote);
  // True, once, if a vote has to be sent: there is no decision, and no vote is in effect.
  // FAILED_PRECONDITION: the norm has not arrived, or the seal was refused meanwhile.
  absl::StatusOr<bool> StartVote();
  // True, once, if a discard has to be sent: there is no decision, and no discard is pending until
  // AwaitDiscarded returns. From then on `discarding` is true until its answer.
  bool StartDiscard();
  bool discarding() const;
  bool has_norm() const;
  // The step was decided although this rank has not sealed it: it was lost.
  bool given_up() const;

  // From the stream. INTERNAL if the message is about another step, or out of order. A refusal of
  // an older attempt is ignored.
  absl::Status Refused(StepAttempt at, absl::Status why);
  absl::Status Normed(StepNorm norm);
  absl::Status VoteRefused(StepAttempt at, absl::Status why);
  // The rank is in attempt `at` from now on, and has not begun it.
  absl::Status Discarded(StepAttempt at);
  absl::Status Decided(StepDecision decision);
  // The decided step has a second round, whose directions the ranks orthogonalize.
  absl::Status Directions(uint64_t step);
  absl::Status Committed(uint64_t step, double update_seconds);
  // The weights of the chunk, after the decision, are in place.
  void Arrived(int chunk);
  // It may arrive after the decision and the end of its step; then it is ignored.
  void Waiting(uint64_t step, std::vector<int> ranks);
  // Ends all waits, current and later ones. The first failure stays.
  void Fail(const absl::Status& status);

  absl::Status failure() const;
  // Waits for the decision, which stays. FAILED_PRECONDITION with the message of a refusal;
  // DEADLINE_EXCEEDED.
  absl::StatusOr<StepDecision> AwaitDecision(absl::Duration limit);
  // Waits for the norm, which stays; or for the decision of a lost step, and returns the decision's
  // norm. Errors as in AwaitDecision.
  absl::StatusOr<StepNorm> AwaitNorm(absl::Duration limit);
  // Waits for the answer to the discard that was sent. FAILED_PRECONDITION: the step is decided.
  absl::Status AwaitDiscarded(absl::Duration limit);
  // Waits for the weights of these chunks, or for the end of the step. FAILED_PRECONDITION: no
  // decision.
  absl::Status AwaitWeights(absl::Span<const int> chunks, absl::Duration limit);
  // Waits for directions, or the end of the step: then false, also if there were some.
  // FAILED_PRECONDITION: no decision.
  absl::StatusOr<bool> AwaitDirections(absl::Duration limit);
  // Waits for the end of the step. Returns the update seconds.
  absl::StatusOr<double> AwaitCommitted(absl::Duration limit);

  // The ranks that the seal waits for, by the service's last message. May be empty.
  std::vector<int> awaited_ranks() const;
  // Whether the step is decided, and its update applied.
  bool applies(uint64_t step) const;

  // The step's progress at one instant.
  struct Standing {
    uint64_t step = 0;  // 0: no step is open.
    bool decided = false;
    bool awaits_orthogonal = false;
    bool committed = false;
  };
  Standing standing() const;

 private:
  absl::Status CheckStep(const char* what, uint64_t step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // It has discarded an attempt at the step, and not begun the next one.
  bool IsBetweenAttemptsAt(uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The attempt of a norm or a refused vote is over, or its seal was undone.
  bool IsLate(StepAttempt at) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HaveArrived(absl::Span<const int> chunks) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // This rank's last message of its part, unless it was refused. A vote implies a seal.
  enum class Said : uint8_t { kNothing, kSeal, kVote };
  // kNone again once AwaitDiscarded has returned the answer.
  enum class Discard : uint8_t { kNone, kSent, kAnswered };
  // About one attempt.
  struct Now {
    uint64_t step = 0;  // 0: no step is open.
    Said said = Said::kNothing;
    std::optional<StepNorm> norm;
    bool norm_is_told = false;  // By AwaitNorm.
    std::optional<absl::Status> refusal;
    std::vector<int> awaited_ranks;
    std::optional<StepDecision> decision;
    bool has_directions = false;
    std::vector<bool> arrived;  // By chunk, up to the last one that has.
    std::optional<double> update_seconds;
  };

  mutable Mutex mutex_;
  CondVar changed_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  uint32_t attempt_ ABSL_GUARDED_BY(mutex_) = 0;    // At the step, or at the next one.
  StepAttempt newest_ ABSL_GUARDED_BY(mutex_) = 0;  // The newest that has begun, or that followed a
                                                    // discard.
  Discard discard_ ABSL_GUARDED_BY(mutex_) = Discard::kNone;
  Now now_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_STEP_PROGRESS_H_
