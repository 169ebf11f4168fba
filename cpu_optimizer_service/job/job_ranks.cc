// Who holds which rank: attaching, streams, generations.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"
#include "cpu_optimizer_service/job/job_stream.h"

namespace ballast {
bool JobImpl::IsCurrent(const StreamKey& key) const {
  return ranks_[key.rank].stream == key.stream;
}

absl::Status JobImpl::CheckCurrent(const StreamKey& key) const {
  if (IsCurrent(key)) return CheckUsable();
  return absl::AbortedError(absl::StrCat("this stream of rank ", key.rank, " of job ", spec_.name,
                                         " is no longer its stream; attach again"));
}

absl::Status JobImpl::CheckGeneration(uint64_t generation) const {
  if (generation == generation_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("job ", spec_.name, " is at generation ", generation_,
                                         ", not ", generation, "; attach again"));
}

void JobImpl::WaitUntilSettled() const {
  while (deciding_ || clearing_ || loading_) changed_.Wait(mutex_);
}

absl::Status JobImpl::WaitUntilDecided() const {
  while (!loading_ && (deciding_ || clearing_ || std::holds_alternative<SealedStep>(step_))) {
    changed_.Wait(mutex_);
  }
  return loading_ ? CheckUsable() : absl::OkStatus();
}

void JobImpl::FreeIfLeft(Rank& rank) {
  if (rank.left) rank.process_id.clear();
  rank.left = false;
}

void JobImpl::ClearStep() {
  step_ = std::monostate();  // Nothing new can be added from here on.
  clearing_ = true;
  ++attempt_;
  const auto busy = [](const Rank& rank) { return rank.in_flight > 0; };
  while (deciding_ || sums_running_ > 0 || std::any_of(ranks_.begin(), ranks_.end(), busy)) {
    changed_.Wait(mutex_);
  }
  FinishGuesses();
  DropGuesses();
  ledger_.Clear();
  // The next attempt begins after an operator's changes, so its overrides come last again.
  later_changes_.assign(later_changes_.size(), {});
  for (int chunk = 0; chunk < static_cast<int>(layout_.chunks().size()); ++chunk) {
    gradients_->Clear(chunk);
  }
  sums_.assign(sums_.size(), SumsState::kNone);
  clearing_ = false;
  changed_.NotifyAll();
}

JobImpl::Detached JobImpl::RaiseGeneration() {
  ++generation_;
  Detached detached;
  for (int rank = 0; rank < layout_.world_size(); ++rank) {
    TakeListener(ranks_[rank], detached.listeners);
    ranks_[rank].process_id.clear();
    ranks_[rank].left = false;
    detached.memories.push_back(std::move(ranks_[rank].memory));
    ForgetFirstWeights(rank);
  }
  ClearStep();
  // A process of the old generation may go on writing there: from here on nobody reads it.
  for (Rank& rank : ranks_) detached.memories.push_back(std::move(rank.lender));
  return detached;
}

void JobImpl::Detach(const Listeners& listeners, const absl::Status& status) {
  for (const auto& listener : listeners) listener->OnDetached(status);
}

absl::Status JobImpl::CheckAttachRequest(const AttachRequest& request) const {
  if (request.rank < 0 || request.rank >= layout_.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", request.rank, " is not in job ",
                                                   spec_.name, ", whose world size is ",
                                                   layout_.world_size()));
  }
  if (request.process_id.empty() || request.process_id.size() > kMaxProcessIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("process_id must have 1 to ", kMaxProcessIdBytes, " bytes"));
  }
  if (!request.uid.empty() && request.uid != uid_) {
    return absl::NotFoundError(absl::StrCat("job ", spec_.name, " is not the one with uid ",
                                            request.uid, "; it was created anew"));
  }
  if (request.spec.has_value()) {
    if (const std::string difference = FirstDifference(spec_, *request.spec); !difference.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", request.rank, " describes job ", spec_.name, " otherwise: ", difference,
          " (here: the service's job); close the job or train with the same description"));
    }
  }
  return absl::OkStatus();
}

bool JobImpl::IsTaken(const AttachRequest& request) const {
  const Rank& rank = ranks_[request.rank];
  return !rank.process_id.empty() && rank.process_id != request.process_id;
}

absl::Status JobImpl::CheckMayAttach(const AttachRequest& request) const {
  BALLAST_RETURN_IF_ERROR(closed_ ? CheckUsable() : absl::OkStatus());
  if (request.generation.has_value()) {
    BALLAST_RETURN_IF_ERROR(CheckGeneration(*request.generation));
    if (IsTaken(request)) {
      return absl::AbortedError(absl::StrCat("another process has taken rank ", request.rank,
                                             " of job ", spec_.name, " in generation ",
                                             generation_));
    }
  }
  const std::string& last = ranks_[request.rank].last_process_id;
  if (request.rejoin && !last.empty() && last != request.process_id) {
    return absl::FailedPreconditionError(absl::StrCat("another process has taken rank ",
                                                      request.rank, " of job ", spec_.name, ": ",
                                                      last, "; this one was replaced"));
  }
  if (request.expected_committed_step.has_value() &&
      *request.expected_committed_step != committed_step_) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", spec_.name, " stands at step ", committed_step_, ", rank ",
                     request.rank, " expected ", *request.expected_committed_step));
  }
  return absl::OkStatus();
}

absl::StatusOr<Attachment> JobImpl::AttachNow(const AttachRequest& request) {
  BALLAST_RETURN_IF_ERROR(CheckAttachRequest(request));
  Attachment attachment;
  Detached detached;
  std::string reason;
  {
    MutexLock lock(mutex_);
    BALLAST_RETURN_IF_ERROR(WaitUntilDecided());  // What is sealed and whole rolls forward first.
    BALLAST_RETURN_IF_ERROR(CheckMayAttach(request));
    Rank& rank = ranks_[request.rank];
    // Who comes anew in mid-step does the step anew: what was sent before must not meet what is
    // sent now.
    const bool taken = IsTaken(request);
    if (taken || (!request.generation.has_value() && HasBegun(request.rank))) {
      detached = RaiseGeneration();
      reason = absl::StrCat(taken ? "a new process" : "a new session of its process",
                            " has taken rank ", request.rank, " of job ", spec_.name,
                            "; the generation is now ", generation_, "; attach again");
    } else {
      // An older stream may be broken, though nobody here has noticed: when that ends it must not
      // take the rank away again.
      TakeListener(rank, detached.listeners);
      reason = absl::StrCat("rank ", request.rank, " has attached again");
      if (rank.last_process_id != request.process_id) {
        ForgetFirstWeights(request.rank);
        detached.memories.push_back(std::move(rank.memory));
      }
    }
    rank.process_id = request.process_id;
    rank.last_process_id = request.process_id;
    rank.left = false;
    attachment = {.generation = generation_,
                  .committed_step = committed_step_,
                  .awaiting_weights = weights_missing_ > 0};
  }
  Detach(detached.listeners, absl::AbortedError(reason));
  return attachment;
}

absl::StatusOr<std::unique_ptr<RankStream>> JobImpl::OpenStreamNow(
    const OpenStreamRequest& request, std::shared_ptr<RankListener> listener) {
  if (request.uid != uid_) {
    return absl::NotFoundError(absl::StrCat("job ", spec_.name, " is not the one with uid '",
                                            request.uid, "'; attach first"));
  }
  if (request.rank < 0 || request.rank >= layout_.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank, " is not in job ", spec_.name));
  }
  Listeners replaced;
  absl::Status status;
  std::unique_ptr<RankStream> stream;
  {
    MutexLock lock(mutex_);
    status = AwaitClaim(request, replaced);
    if (status.ok()) {
      const StreamKey key = {.rank = request.rank, .stream = ++last_stream_};
      Rank& rank = ranks_[request.rank];
      rank.listener = std::move(listener);
      rank.stream = key.stream;
      rank.update_mode = request.update_mode;
      rank.weights_in_place = request.weights_in_place;
      rank.left = false;
      stream = std::make_unique<Stream>(std::static_pointer_cast<JobImpl>(shared_from_this()), key,
                                        PositionOf(request.rank));
    }
  }
  Detach(replaced, absl::AbortedError(absl::StrCat("a newer stream has replaced this one of rank ",
                                                   request.rank)));
  if (!status.ok()) return status;
  return stream;
}

// What the older stream is adding ends first; meanwhile the step may be decided, and then its
// update ends first, too.
absl::Status JobImpl::AwaitClaim(const OpenStreamRequest& request, Listeners& replaced) {
  Rank& rank = ranks_[request.rank];
  for (;;) {
    BALLAST_RETURN_IF_ERROR(WaitUntilDecided());
    if (closed_) return CheckUsable();
    BALLAST_RETURN_IF_ERROR(CheckGeneration(request.generation));
    BALLAST_RETURN_IF_ERROR(CheckUsable());
    if (rank.process_id.empty() || rank.process_id != request.process_id) {
      return absl::AbortedError(absl::StrCat("rank ", request.rank, " of job ", spec_.name,
                                             " is not held by this process; attach again"));
    }
    if (request.weights_in_place && rank.memory == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", request.rank, " wants its weights in shared memory, but job ",
                       spec_.name, " shares none with it"));
    }
    TakeListener(rank, replaced);
    if (rank.in_flight == 0) return absl::OkStatus();
    changed_.Wait(mutex_);
  }
}

void JobImpl::TakeListener(Rank& rank, Listeners& taken) {
  if (rank.listener != nullptr) taken.push_back(std::move(rank.listener));
  rank.listener = nullptr;
  rank.stream = 0;
}

// The weights of two attempts do not mix.
void JobImpl::ForgetFirstWeights(int rank) {
  if (weights_missing_ == 0) return;
  for (const int chunk : layout_.chunks_of_rank(rank)) {
    weights_missing_ += weights_arrived_[chunk] ? 1 : 0;
    weights_arrived_[chunk] = false;
  }
}

void JobImpl::CloseStream(const StreamKey& key) {
  std::shared_ptr<RankListener> listener;  // Destroyed outside the lock.
  MutexLock lock(mutex_);
  Rank& rank = ranks_[key.rank];
  if (!IsCurrent(key)) return;
  listener = std::move(rank.listener);
  rank.listener = nullptr;
  rank.stream = 0;
  // A rank that has no part in the step in progress is free again, and the others are when it is
  // over, so that a restart between steps disturbs nobody.
  rank.left = true;
  if (!HasBegun(key.rank)) FreeIfLeft(rank);
}

bool JobImpl::HasBegun(int rank) const {
  const auto has_begun = [&](const auto& step) {
    if constexpr (std::is_same_v<std::decay_t<decltype(step)>, std::monostate>) {
      return false;
    } else {
      return step.ranks()[rank].begun;
    }
  };
  return std::visit(has_begun, step_);
}

RankPosition JobImpl::PositionOf(int rank) const {
  RankPosition position;
  position.generation = generation_;
  position.committed_step = committed_step_;
  const auto* open = std::get_if<OpenStep>(&step_);
  if (open == nullptr || !open->ranks()[rank].begun) return position;
  position.open_step = open->terms().step;
  position.micro_steps_ended = open->ranks()[rank].micro_steps_ended;
  for (const int chunk : layout_.chunks_of_rank(rank)) {
    if (const uint32_t next = ledger_.next_micro_step(chunk); next > 0) {
      position.delivered.push_back({.chunk = chunk, .next_micro_step = next});
    }
  }
  return position;
}

}  // namespace ballast
