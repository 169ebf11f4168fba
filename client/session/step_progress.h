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
#include "client/session.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

class StepProgress {
 public:
  // Forgets the previous step.
  void Begin(uint64_t step);
  uint64_t step() const;  // 0: none is open.
  // The step is over on this rank.
  void End();

  // True, once, if a seal has to be sent: there is no decision, and no seal was sent or the last
  // one was refused.
  bool StartSeal();

  // From the stream. INTERNAL if the message is not of the step in progress, or is out of order.
  absl::Status Refused(uint64_t step, absl::Status why);
  absl::Status Decided(StepDecision decision);
  absl::Status Committed(uint64_t step, double update_seconds);
  // It may arrive after the decision and the end of its step; then it is ignored.
  void Waiting(uint64_t step, std::vector<int> ranks);
  // Ends all waits, current and later ones. The first failure stays.
  void Fail(const absl::Status& status);

  absl::Status failure() const;
  // Waits for the decision, which stays. FAILED_PRECONDITION with the message of a refusal;
  // DEADLINE_EXCEEDED.
  absl::StatusOr<StepDecision> AwaitDecision(absl::Duration limit);
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

  mutable Mutex mutex_;
  CondVar changed_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  bool seal_is_out_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> refusal_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> awaited_ranks_ ABSL_GUARDED_BY(mutex_);
  std::optional<StepDecision> decision_ ABSL_GUARDED_BY(mutex_);
  std::optional<double> update_seconds_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_STEP_PROGRESS_H_
