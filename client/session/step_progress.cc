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

void StepProgress::Begin(uint64_t step) {
  MutexLock lock(mutex_);
  Now now = {.step = step};
  if (IsBetweenAttemptsAt(step)) {
    now.decision = std::move(now_.decision);
    now.update_seconds = now_.update_seconds;
  }
  now_ = std::move(now);
  discard_ = Discard::kNone;
  // What comes of anything older is late from now on.
  newest_ = {step, attempt_};
}

StepAttempt StepProgress::at() const {
  MutexLock lock(mutex_);
  return {now_.step, attempt_};
}

void StepProgress::End() {
  MutexLock lock(mutex_);
  now_ = {};
  discard_ = Discard::kNone;
  attempt_ = 0;
}

bool StepProgress::StartDiscard() {
  MutexLock lock(mutex_);
  // An answer that arrived after a call gave up waiting is that call's: the next one returns it,
  // and does not discard the attempt after it, too.
  if (now_.decision.has_value() || discard_ != Discard::kNone) return false;
  discard_ = Discard::kSent;
  return true;
}

bool StepProgress::discarding() const {
  MutexLock lock(mutex_);
  return discard_ == Discard::kSent;
}

bool StepProgress::has_norm() const {
  MutexLock lock(mutex_);
  return now_.norm.has_value();
}

bool StepProgress::given_up() const {
  MutexLock lock(mutex_);
  return now_.decision.has_value() && now_.said == Said::kNothing;
}

bool StepProgress::StartSeal(bool with_vote) {
  MutexLock lock(mutex_);
  // One seal at a time: a later Seal waits for the answer to the one that was sent.
  if (now_.said != Said::kNothing || now_.decision.has_value()) return false;
  // A norm that came after a call had given up waiting is what this call returns. Should its seal
  // have been refused since, StartVote says so.
  if (now_.norm.has_value() && !now_.norm_is_told) return false;
  now_.norm.reset();
  now_.said = with_vote ? Said::kVote : Said::kSeal;
  now_.refusal.reset();
  return true;
}

absl::StatusOr<bool> StepProgress::StartVote() {
  MutexLock lock(mutex_);
  if (now_.decision.has_value() || now_.said == Said::kVote) return false;
  // The seal was refused, perhaps after its norm had come, because another rank has discarded the
  // attempt. A vote decides nothing then.
  if (now_.said == Said::kNothing && now_.refusal.has_value()) return *now_.refusal;
  if (!now_.norm.has_value()) {
    return absl::FailedPreconditionError("Vote before Seal has returned the norm");
  }
  now_.said = Said::kVote;
  now_.refusal.reset();
  now_.awaited_ranks.clear();
  return true;
}

// Then the step may be skipped, if a rank is lost. The next attempt finds its decision.
bool StepProgress::IsBetweenAttemptsAt(uint64_t step) const {
  return now_.step == 0 && attempt_ > 0 && step == newest_.step;
}

absl::Status StepProgress::CheckStep(const char* what, uint64_t step) const {
  if (step == now_.step || IsBetweenAttemptsAt(step)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the service sent ", what, " of step ", step,
                                          " while this rank is at step ", now_.step));
}

absl::Status StepProgress::Refused(StepAttempt at, absl::Status why) {
  MutexLock lock(mutex_);
  // Late, also after the decision of a step that could not be kept: see IsLate.
  if (at < newest_ || (at == newest_ && (now_.step == 0 || now_.decision.has_value()))) {
    return absl::OkStatus();
  }
  if (absl::Status status = CheckStep("the refusal of a seal", at.step); !status.ok()) {
    return status;
  }
  // A norm that has arrived is returned nevertheless: another rank may have discarded the attempt
  // for it, as this one then does. The vote is refused.
  now_.refusal = std::move(why);
  now_.said = Said::kNothing;
  now_.awaited_ranks.clear();  // They were awaited by the seal that was refused.
  changed_.NotifyAll();
  return absl::OkStatus();
}

// The service's threads may overtake one another.
bool StepProgress::IsLate(StepAttempt at) const {
  return at < newest_ ||
         (at == newest_ && (now_.said == Said::kNothing || now_.decision.has_value()));
}

absl::Status StepProgress::Normed(StepNorm norm) {
  MutexLock lock(mutex_);
  const StepAttempt at = {norm.step, norm.attempt};
  if (IsLate(at)) return absl::OkStatus();
  if (absl::Status status = CheckStep("the norm", at.step); !status.ok()) return status;
  if (now_.norm.has_value()) return absl::OkStatus();  // It comes again before a refusal.
  now_.norm = std::move(norm);
  now_.norm_is_told = false;
  now_.awaited_ranks.clear();
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status StepProgress::VoteRefused(StepAttempt at, absl::Status why) {
  MutexLock lock(mutex_);
  if (IsLate(at)) return absl::OkStatus();
  if (absl::Status status = CheckStep("the refusal of a vote", at.step); !status.ok()) {
    return status;
  }
  now_.refusal = std::move(why);
  now_.said = Said::kSeal;  // The step is still sealed, and only the vote has to come again.
  now_.awaited_ranks.clear();
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status StepProgress::Discarded(StepAttempt at) {
  MutexLock lock(mutex_);
  // Only the answer to a discard of its own moves a rank to another attempt, and by one.
  if (discard_ != Discard::kSent || at.attempt != attempt_ + 1) {
    return absl::InternalError(absl::StrCat("the service has discarded up to attempt ", at.attempt,
                                            " of step ", at.step,
                                            discard_ == Discard::kSent ? "" : " without a request",
                                            " while this rank is in attempt ", attempt_));
  }
  now_ = {};
  discard_ = Discard::kAnswered;
  attempt_ = at.attempt;
  newest_ = at;
  changed_.NotifyAll();
  return absl::OkStatus();
}

void StepProgress::Waiting(uint64_t step, std::vector<int> ranks) {
  MutexLock lock(mutex_);
  if (step == now_.step) now_.awaited_ranks = std::move(ranks);
}

absl::Status StepProgress::Decided(StepDecision decision) {
  MutexLock lock(mutex_);
  // The step alone is checked: it is decided once, and a decision names no attempt.
  if (absl::Status status = CheckStep("the decision", decision.step); !status.ok()) return status;
  now_.decision = std::move(decision);
  // It came too late, and this is the answer.
  if (discard_ == Discard::kSent) discard_ = Discard::kAnswered;
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status StepProgress::Directions(uint64_t step) {
  MutexLock lock(mutex_);
  if (absl::Status status = CheckStep("the directions", step); !status.ok()) return status;
  if (!now_.decision.has_value()) {
    return absl::InternalError(
        absl::StrCat("the service sent directions of step ", step, " before its decision"));
  }
  now_.has_directions = true;
  now_.awaited_ranks.clear();
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status StepProgress::Committed(uint64_t step, double update_seconds) {
  MutexLock lock(mutex_);
  if (absl::Status status = CheckStep("the end", step); !status.ok()) return status;
  if (!now_.decision.has_value()) {
    return absl::InternalError(
        absl::StrCat("the service committed step ", step, " before its decision"));
  }
  // That it has a value means that the step is committed.
  now_.update_seconds = update_seconds;
  changed_.NotifyAll();
  return absl::OkStatus();
}

void StepProgress::Arrived(int chunk) {
  MutexLock lock(mutex_);
  const auto index = static_cast<size_t>(chunk);
  if (index >= now_.arrived.size()) now_.arrived.resize(index + 1);
  now_.arrived[index] = true;
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
    if (now_.decision.has_value()) return *now_.decision;
    if (!failure_.ok()) return failure_;
    if (now_.refusal.has_value()) return *now_.refusal;
    // Last, as in the waits below: what came with the deadline still counts.
    if (!in_time) return TimedOut("the decision", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

absl::StatusOr<StepNorm> StepProgress::AwaitNorm(absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (now_.decision.has_value()) {  // The vote is of no consequence.
      return StepNorm{.step = now_.step, .norm = now_.decision->norm};
    }
    if (now_.norm.has_value()) {
      now_.norm_is_told = true;
      return *now_.norm;
    }
    if (!failure_.ok()) return failure_;
    if (now_.refusal.has_value()) return *now_.refusal;
    if (!in_time) return TimedOut("the norm", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

absl::Status StepProgress::AwaitDiscarded(absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    // A decision that comes behind the answer is the next attempt's.
    if (now_.decision.has_value() && now_.step != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", now_.step,
                       " is decided and can no longer be discarded; receive its "
                       "weights"));
    }
    if (discard_ != Discard::kSent) {
      // From here on a Discard is another one: see StartDiscard.
      discard_ = Discard::kNone;
      return absl::OkStatus();
    }
    if (!failure_.ok()) return failure_;
    if (!in_time) return TimedOut("the answer to the discard", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

bool StepProgress::HaveArrived(absl::Span<const int> chunks) const {
  for (const int chunk : chunks) {
    if (static_cast<size_t>(chunk) >= now_.arrived.size() || !now_.arrived[chunk]) return false;
  }
  return true;
}

absl::Status StepProgress::AwaitWeights(absl::Span<const int> chunks, absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (!now_.decision.has_value()) return absl::FailedPreconditionError("no step is decided");
    // A skipped step brings no weights, and at the end of an applied one all are there.
    if (!now_.decision->applied || now_.update_seconds.has_value()) return absl::OkStatus();
    if (!failure_.ok()) return failure_;
    if (HaveArrived(chunks)) return absl::OkStatus();
    if (!in_time) return TimedOut("the end of the step", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

absl::StatusOr<bool> StepProgress::AwaitDirections(absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (!now_.decision.has_value()) return absl::FailedPreconditionError("no step is decided");
    if (!now_.decision->applied || now_.update_seconds.has_value()) return false;
    if (!failure_.ok()) return failure_;
    if (now_.has_directions) return true;
    if (!in_time) return TimedOut("the directions", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

absl::StatusOr<double> StepProgress::AwaitCommitted(absl::Duration limit) {
  const auto deadline = SteadyDeadline(limit);
  MutexLock lock(mutex_);
  bool in_time = true;
  for (;;) {
    if (now_.update_seconds.has_value()) return *now_.update_seconds;
    if (!failure_.ok()) return failure_;
    if (!in_time) return TimedOut("the end of the step", limit);
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
}

std::vector<int> StepProgress::awaited_ranks() const {
  MutexLock lock(mutex_);
  return now_.awaited_ranks;
}

bool StepProgress::applies(uint64_t step) const {
  MutexLock lock(mutex_);
  return now_.decision.has_value() && now_.decision->applied && now_.decision->step == step;
}

StepProgress::Standing StepProgress::standing() const {
  MutexLock lock(mutex_);
  return {.step = now_.step,
          .decided = now_.decision.has_value(),
          .awaits_orthogonal = now_.has_directions && !now_.update_seconds.has_value(),
          .committed = now_.update_seconds.has_value()};
}

}  // namespace ballast::client
