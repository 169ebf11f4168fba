#include "tests/histories/engine/recording_listener.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast::histories {

void RecordingListener::Complain(const std::string& what) {
  if (fault_.ok()) fault_ = absl::InternalError(what);
}

bool RecordingListener::Ignores() {
  if (!IsDead()) return false;
  changed_.NotifyAll();
  return true;
}

void RecordingListener::OnWaiting(uint64_t step, const std::vector<int>& ranks,
                                  const std::string& /*why*/) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  waiting_ = ranks;
}

void RecordingListener::OnSealRefused(uint64_t step, const SealRefusal& refusal) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  if (step <= decided_step_) Complain(absl::StrCat("a seal of decided step ", step, " refused"));
  ++refusals_;
}

void RecordingListener::OnNorm(const StepNorm& norm) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  if (norm.step <= decided_step_) Complain(absl::StrCat("the norm of decided step ", norm.step));
  norm_ = norm;
  changed_.NotifyAll();
}

void RecordingListener::OnVoteRefused(StepAttempt at, const absl::Status& why) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  if (at.step <= decided_step_) Complain(absl::StrCat("a vote on decided step ", at.step));
  ++vote_refusals_;
}

void RecordingListener::MayGuess(bool may_guess) {
  MutexLock lock(mutex_);
  may_guess_ = may_guess;
}

std::optional<StepNorm> RecordingListener::AwaitNorm(StepAttempt at) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  MutexLock lock(mutex_);
  while (!norm_.has_value() || StepAttempt(norm_->step, norm_->attempt) != at) {
    if (IsDead() || !changed_.WaitUntil(mutex_, deadline)) return std::nullopt;
  }
  return norm_;
}

int64_t RecordingListener::vote_refusals() const {
  MutexLock lock(mutex_);
  return vote_refusals_;
}

void RecordingListener::OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer shard) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  if (!speculates_) Complain("provisional weights on a stream that takes none");
  if (step <= decided_step_) {
    Complain(absl::StrCat("provisional weights of step ", step, " after its decision"));
  }
  if (!shard) return Complain(absl::StrCat("provisional weights of chunk ", chunk, " are null"));
  const bool is_first = !provisional_.contains(chunk);
  provisional_[chunk].assign(shard.bytes().begin(), shard.bytes().end());
  if (!is_first && !may_guess_)
    Complain(absl::StrCat("provisional weights of chunk ", chunk, " came twice"));
}

void RecordingListener::OnDecision(const StepOutcome& outcome,
                                   absl::Span<const int> dropped_chunks) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  if (outcome.step <= decided_step_)
    Complain(absl::StrCat("step ", outcome.step, " decided twice"));
  decided_step_ = outcome.step;
  outcomes_.push_back(outcome);
  for (const int chunk : dropped_chunks) {
    if (provisional_.erase(chunk) == 0) {
      Complain(absl::StrCat("chunk ", chunk, " dropped that was not provisional"));
    }
  }
  if (outcome.decision.apply) {
    shards_ = std::move(provisional_);
    unread_.clear();
  }
  provisional_.clear();
}

void RecordingListener::OnWeights(uint64_t step, int chunk, WeightBuffer shard) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  const bool applies = outcomes_.empty() || outcomes_.back().decision.apply;
  if (step != decided_step_ || !applies) {
    return Complain(absl::StrCat("weights of step ", step, ", which is not decided to apply"));
  }
  if (shards_.contains(chunk) || unread_.contains(chunk)) {
    Complain(absl::StrCat("weights of chunk ", chunk, " came twice"));
  }
  if (shard) {
    shards_[chunk].assign(shard.bytes().begin(), shard.bytes().end());
  } else {
    unread_.insert(chunk);
  }
}

void RecordingListener::OnDirections(uint64_t step) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  if (step != decided_step_) Complain(absl::StrCat("directions of undecided step ", step));
  directions_step_ = step;
  changed_.NotifyAll();
}

bool RecordingListener::AwaitsOrthogonal(uint64_t step) const {
  MutexLock lock(mutex_);
  return directions_step_ == step && committed_step_ < step;
}

void RecordingListener::OpenedInDirections(uint64_t step) {
  MutexLock lock(mutex_);
  decided_step_ = directions_step_ = step;
}

void RecordingListener::OnCommitted(uint64_t step, double update_seconds, const std::string& left) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  if (step != decided_step_) Complain(absl::StrCat("step ", step, " committed but not decided"));
  committed_step_ = step;
  changed_.NotifyAll();
}

void RecordingListener::OnDetached(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (Ignores()) return;
  detached_ = status;
  changed_.NotifyAll();
}

void RecordingListener::Discarded() {
  MutexLock lock(mutex_);
  provisional_.clear();
}

bool RecordingListener::AwaitCommit(uint64_t step) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  MutexLock lock(mutex_);
  while (committed_step_ < step && detached_.ok() && !IsDead()) {
    if (!changed_.WaitUntil(mutex_, deadline)) break;
  }
  return committed_step_ >= step;
}

bool RecordingListener::AwaitDirectionsOrCommit(uint64_t step) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  MutexLock lock(mutex_);
  while (std::max(committed_step_, directions_step_) < step && detached_.ok() && !IsDead()) {
    if (!changed_.WaitUntil(mutex_, deadline)) break;
  }
  return std::max(committed_step_, directions_step_) >= step;
}

absl::Status RecordingListener::fault() const {
  MutexLock lock(mutex_);
  return fault_;
}
uint64_t RecordingListener::committed_step() const {
  MutexLock lock(mutex_);
  return committed_step_;
}
int64_t RecordingListener::refusals() const {
  MutexLock lock(mutex_);
  return refusals_;
}
std::vector<int> RecordingListener::waiting() const {
  MutexLock lock(mutex_);
  return waiting_;
}
absl::Status RecordingListener::detached() const {
  MutexLock lock(mutex_);
  return detached_;
}
std::vector<StepOutcome> RecordingListener::outcomes() const {
  MutexLock lock(mutex_);
  return outcomes_;
}
std::map<int, std::vector<std::byte>> RecordingListener::shards() const {
  MutexLock lock(mutex_);
  return shards_;
}
std::set<int> RecordingListener::unread_chunks() const {
  MutexLock lock(mutex_);
  return unread_;
}

}  // namespace ballast::histories
