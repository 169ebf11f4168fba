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
  uint64_t step() const { return at().step; }  // 0: none is open.
  // The attempt too, which of a step that is not begun is the next.
  StepAttempt at() const;
  // The step is over on this rank.
  void End();

  // True, once, if a seal has to be sent: there is no decision, and no seal was sent or the last
  // one was refused, and no norm waits to be told.
  bool StartSeal(bool with_vote);
  // True, once, if a vote has to be sent: there is no decision, and none was sent or the last one
  // was refused. FAILED_PRECONDITION: the norm has not come, or the seal was refused meanwhile.
  absl::StatusOr<bool> StartVote();
  // True, once, if a discard has to be sent: there is no decision, and none was sent whose answer
  // AwaitDiscarded has not returned yet. From then on until its answer `discarding` is true.
  bool StartDiscard();
  bool discarding() const;
  bool has_norm() const;
  // The step was decided although this rank has not sealed it: it could not be kept.
  bool given_up() const;

  // From the stream. INTERNAL if the message is not of the step in progress, or is out of order.
  // Of an older attempt, a refusal means nothing.
  absl::Status Refused(StepAttempt at, absl::Status why);
  absl::Status Normed(StepNorm norm);
  absl::Status VoteRefused(StepAttempt at, absl::Status why);
  // The rank is in attempt `at` from now on, and has not begun it.
  absl::Status Discarded(StepAttempt at);
  absl::Status Decided(StepDecision decision);
  absl::Status Committed(uint64_t step, double update_seconds);
  // The weights of the chunk, after the decision, are where they belong.
  void Arrived(int chunk);
  // It may arrive after the decision and the end of its step; then it is ignored.
  void Waiting(uint64_t step, std::vector<int> ranks);
  // Ends all waits, current and later ones. The first failure stays.
  void Fail(const absl::Status& status);

  absl::Status failure() const;
  // Waits for the decision, which stays. FAILED_PRECONDITION with the message of a refusal;
  // DEADLINE_EXCEEDED.
  absl::StatusOr<StepDecision> AwaitDecision(absl::Duration limit);
  // Waits for the norm, which stays; or for the decision of a step that could not be kept: nullopt.
  // Errors as of AwaitDecision.
  absl::StatusOr<std::optional<StepNorm>> AwaitNorm(absl::Duration limit);
  // Waits for the answer to the discard that was sent. FAILED_PRECONDITION: the step is decided.
  absl::Status AwaitDiscarded(absl::Duration limit);
  // Waits for the weights of these chunks, or for the end of the step. FAILED_PRECONDITION: there is
  // no decision.
  absl::Status AwaitWeights(absl::Span<const int> chunks, absl::Duration limit);
  // Waits for the end of the step. Returns the update seconds.
  absl::StatusOr<double> AwaitCommitted(absl::Duration limit);

  // The ranks that the seal waits for, by the service's last message. Empty: none were named.
  std::vector<int> awaited_ranks() const;
  // The decision, if it has arrived.
  std::optional<StepDecision> decision() const;

  // How far the step is, at one instant.
  struct Standing {
    uint64_t step = 0;  // 0: none is open.
    bool decided = false;
    bool committed = false;
  };
  Standing standing() const;

 private:
  absl::Status CheckStep(const char* what, uint64_t step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // What a norm or the refusal of a vote is of is over, or the seal has been undone.
  bool IsLate(StepAttempt at) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HaveArrived(absl::Span<const int> chunks) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t attempt_ ABSL_GUARDED_BY(mutex_) = 0;    // At the step, or at the next one.
  StepAttempt newest_ ABSL_GUARDED_BY(mutex_) = 0;  // That was begun, or came after a discard.
  bool discarding_ ABSL_GUARDED_BY(mutex_) = false;
  bool discard_is_told_ ABSL_GUARDED_BY(mutex_) = true;  // The answer, by AwaitDiscarded.
  bool seal_is_out_ ABSL_GUARDED_BY(mutex_) = false;
  bool vote_is_out_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<StepNorm> norm_ ABSL_GUARDED_BY(mutex_);
  bool norm_is_told_ ABSL_GUARDED_BY(mutex_) = false;  // By AwaitNorm.
  std::optional<absl::Status> refusal_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> awaited_ranks_ ABSL_GUARDED_BY(mutex_);
  std::optional<StepDecision> decision_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> arrived_ ABSL_GUARDED_BY(mutex_);  // By chunk, up to the last one that has.
  std::optional<double> update_seconds_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_STEP_PROGRESS_H_
