#include "client/session/step_progress.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transport/steady_deadline.h"

namespace ballast::client {
namespace {

absl::Status TimedOut(const char* awaited, absl::Duration limit) {
  return absl::DeadlineExceededError(
      absl::StrCat(awaited, " did not arrive within ", absl::FormatDuration(limit)));
}

}  // namespace

void StepProgress::Forget() {
  // attempt_, newest_ and discard_is_told_ stay, because they reach beyond one attempt.
  step_ = 0;
  discarding_ = false;
  seal_is_out_ = false;
  vote_is_out_ = false;
  norm_.reset();
  refusal_.reset();
  awaited_ranks_.clear();
  decision_.reset();
  arrived_.clear();
  update_seconds_.reset();
}

void StepProgress::Begin(uint64_t step) {
  MutexLock lock(mutex_);
  Forget();
  discard_is_told_ = true;
  step_ = step;
  // What comes of anything older is late from now on.
  newest_ = {step, attempt_};
}

StepAttempt StepProgress::at() const {
  MutexLock lock(mutex_);
  return {step_, attempt_};
}

void StepProgress::End() {
  MutexLock lock(mutex_);
  Forget();
  discard_is_told_ = true;
  attempt_ = 0;
}

bool StepProgress::StartDiscard() {
  MutexLock lock(mutex_);
  // An answer that arrived after a call gave up waiting is that call's: the next one returns it,
  // and does not discard the attempt after it, too.
  if (decision_.has_value() || discarding_ || !discard_is_told_) return false;
  discarding_ = true;
  discard_is_told_ = false;
  return true;
}

bool StepProgress::discarding() const {
  MutexLock lock(mutex_);
  return discarding_;
}

bool StepProgress::has_norm() const {
  MutexLock lock(mutex_);
  return norm_.has_value();
}

bool StepProgress::given_up() const {
  MutexLock lock(mutex_);
  return decision_.has_value() && !seal_is_out_;
}

bool StepProgress::StartSeal(bool with_vote) {
  MutexLock lock(mutex_);
  // One seal at a time: a later Seal waits for the answer to the one that was sent.
  if (seal_is_out_ || decision_.has_value()) return false;
  // A norm that came after a call had given up waiting is what this call returns. Should its seal
  // have been refused since, StartVote says so.
  if (norm_.has_value() && !norm_is_told_) return false;
  norm_.reset();
  seal_is_out_ = true;
  vote_is_out_ = with_vote;
  refusal_.reset();
  return true;
}

absl::StatusOr<bool> StepProgress::StartVote() {
  MutexLock lock(mutex_);
  if (decision_.has_value() || vote_is_out_) return false;
  // The seal was refused, perhaps after its norm had come, because another rank has discarded the
  // attempt. A vote decides nothing then.
  if (!seal_is_out_ && refusal_.has_value()) return *refusal_;
  if (!norm_.has_value()) {
    return absl::FailedPreconditionError("Vote before Seal has returned the norm");
  }
  vote_is_out_ = true;
  refusal_.reset();
  awaited_ranks_.clear();
  return true;
}

absl::Status StepProgress::CheckStep(const char* what, uint64_t step) const {
  if (step == step_) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the service sent ", what, " of step ", step,
                                          " while this rank is at step ", step_));
}

absl::Status StepProgress::Refused(StepAttempt at, absl::Status why) {
  MutexLock lock(mutex_);
  // Late, also after the decision of a step that could not be kept: see IsLate.
  if (at < newest_ || (at == newest_ && (step_ == 0 || decision_.has_value()))) {
    return absl::OkStatus();
  }
  if (absl::Status status = CheckStep("the refusal of a seal", at.step); !status.ok()) {
    return status;
  }
  // A norm that has arrived is returned nevertheless: another rank may have discarded the attempt
  // for it, as this one then does. The vote is refused.
  refusal_ = std::move(why);
  seal_is_out_ = false;
  vote_is_out_ = false;
  awaited_ranks_.clear();  // They were awaited by the seal that was refused.
  changed_.NotifyAll();
  return absl::OkStatus();
}

// The service's threads may overtake one another.
bool StepProgress::IsLate(StepAttempt at) const {
  return at < newest_ || (at == newest_ && (!seal_is_out_ || decision_.has_value()));
}

absl::Status StepProgress::Normed(StepNorm norm) {
  MutexLock lock(mutex_);
  const StepAttempt at = {norm.step, norm.attempt};
  if (IsLate(at)) return absl::OkStatus();
  if (absl::Status status = CheckStep("the norm", at.step); !status.ok()) return status;
  norm_ = std::move(norm);
  norm_is_told_ = false;
  awaited_ranks_.clear();
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status StepProgress::VoteRefused(StepAttempt at, absl::Status why) {
  MutexLock lock(mutex_);
  if (IsLate(at)) return absl::OkStatus();
  if (absl::Status status = CheckStep("the refusal of a vote", at.step); !status.ok()) {
    return status;
  }
  refusal_ = std::move(why);
  // seal_is_out_ stays true: the step is still sealed, and only the vote has to come again.
  vote_is_out_ = false;
  awaited_ranks_.clear();
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status StepProgress::Discarded(StepAttempt at) {
  MutexLock lock(mutex_);
  // Only the answer to a discard of its own moves a rank to another attempt, and by one.
  if (!discarding_ || at.attempt != attempt_ + 1) {
    return absl::InternalError(absl::StrCat("the service has discarded up to attempt ", at.attempt,
                                            " of step ", at.step, discarding_ ? "" : ", unasked,",
                                            " while this rank is in attempt ", attempt_));
  }
  Forget();
  attempt_ = at.attempt;
  newest_ = at;
  changed_.NotifyAll();
  return absl::OkStatus();
}

void StepProgress::Waiting(uint64_t step, std::vector<int> ranks) {
  MutexLock lock(mutex_);
  if (step == step_) awaited_ranks_ = std::move(ranks);
}

absl::Status StepProgress::Decided(StepDecision decision) {
  MutexLock lock(mutex_);
  // The step alone is checked: it is decided once, and a decision names no attempt.
  if (absl::Status status = CheckStep("the decision", decision.step); !status.ok()) return status;
  decision_ = std::move(decision);
  discarding_ = false;  // It came too late, and this is the answer.
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status StepProgress::Committed(uint64_t step, double update_seconds) {
  MutexLock lock(mutex_);
  if (absl::Status status = CheckStep("the end", step); !status.ok()) return status;
  if (!decision_.has_value()) {
    return absl::InternalError(
        absl::StrCat("the service committed step ", step, " before its decision"));
  }
  // That it has a value means that the step is committed.
  update_seconds_ = update_seconds;
  changed_.NotifyAll();
  return absl::OkStatus();
}

void StepProgress::Arrived(int chunk) {
  MutexLock lock(mutex_);
  const auto index = static_cast<size_t>(chunk);
  if (index >= arrived_.size()) arrived_.resize(index + 1);
  arrived_[index] = true;
  changed_.NotifyAll();
}

void StepProgress::Fail(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (failure_.ok()) failure_ = status;  // Later ones are consequences of the first.
  changed_.NotifyAll();
}

absl::Status StepProgress::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

absl::StatusOr<StepDecision> StepProgress::AwaitDecision(absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    // A decision that arrived is valid even if the stream failed later.
    if (decision_.has_value()) return *decision_;
    if (!failure_.ok()) return failure_;
    if (refusal_.has_value()) return *refusal_;
    // Last, as in the waits below: what came with the deadline still counts.
    if (!in_time) return TimedOut("the decision", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

absl::StatusOr<std::optional<StepNorm>> StepProgress::AwaitNorm(absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (decision_.has_value()) return std::nullopt;
    if (norm_.has_value()) {
      norm_is_told_ = true;
      return norm_;
    }
    if (!failure_.ok()) return failure_;
    if (refusal_.has_value()) return *refusal_;
    if (!in_time) return TimedOut("the norm", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

absl::Status StepProgress::AwaitDiscarded(absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (decision_.has_value()) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", step_,
                       " is decided and can no longer be discarded; receive its "
                       "weights"));
    }
    if (!discarding_) {
      // From here on a Discard is another one: see StartDiscard.
      discard_is_told_ = true;
      return absl::OkStatus();
    }
    if (!failure_.ok()) return failure_;
    if (!in_time) return TimedOut("the answer to the discard", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

bool StepProgress::HaveArrived(absl::Span<const int> chunks) const {
  for (const int chunk : chunks) {
    if (static_cast<size_t>(chunk) >= arrived_.size() || !arrived_[chunk]) return false;
  }
  return true;
}

absl::Status StepProgress::AwaitWeights(absl::Span<const int> chunks, absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (!decision_.has_value()) return absl::FailedPreconditionError("no step is decided");
    // A skipped step brings no weights, and at the end of an applied one all are there.
    if (!decision_->applied || update_seconds_.has_value()) return absl::OkStatus();
    if (!failure_.ok()) return failure_;
    if (HaveArrived(chunks)) return absl::OkStatus();
    if (!in_time) return TimedOut("the end of the step", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

absl::StatusOr<double> StepProgress::AwaitCommitted(absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (update_seconds_.has_value()) return *update_seconds_;
    if (!failure_.ok()) return failure_;
    if (!in_time) return TimedOut("the end of the step", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

std::vector<int> StepProgress::awaited_ranks() const {
  MutexLock lock(mutex_);
  return awaited_ranks_;
}

std::optional<StepDecision> StepProgress::decision() const {
  MutexLock lock(mutex_);
  return decision_;
}

StepProgress::Standing StepProgress::standing() const {
  MutexLock lock(mutex_);
  return {
      .step = step_, .decided = decision_.has_value(), .committed = update_seconds_.has_value()};
}

}  // namespace ballast::client
