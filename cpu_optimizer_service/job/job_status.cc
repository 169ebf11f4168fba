// The picture of a job that others are shown.
#include <algorithm>
#include <optional>
#include <vector>

#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

Attachment JobImpl::Position() const {
  MutexLock lock(mutex_);
  return PositionNow();
}

Attachment JobImpl::PositionNow() const {
  return {.generation = record_.generation,
          .committed_step = committed_step(),
          .awaiting_weights = !first_weights_.complete()};
}

Job::Use JobImpl::use() const {
  MutexLock lock(mutex_);
  return UseNow();
}

Job::Use JobImpl::UseNow() const {
  Use use = {.changes = changes_};
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].listener != nullptr) ++use.streams;
  }
  return use;
}

JobStatus JobImpl::Status() const {
  MutexLock lock(mutex_);
  JobStatus status;
  status.generation = record_.generation;
  status.committed_step = committed_step();
  status.state_writes = record_.state_writes;
  if (record_.previous.has_value()) status.undoable_step = record_.committed_step;
  status.applied_steps = record_.history.applied_steps;
  status.skipped_steps = record_.history.skipped_steps;
  status.coverage_complete_steps = record_.history.coverage_complete_steps;
  status.speculation = record_.history.speculation;
  status.statistics = record_.history.statistics;
  status.traffic = traffic_.total();
  status.gate = gate_.ToString();
  status.recent_steps.assign(record_.history.recent_steps.begin(),
                             record_.history.recent_steps.end());
  status.latest = history_.Latest();
  status.trainer_state = record_.trainer_state;
  status.resumed_uid = record_.resumed_uid;
  status.ancestors = record_.ancestors;
  status.hyper_parameters = record_.hyper_parameters;
  status.update_counts.resize(record_.update_counts.size());
  // While first weights are awaited the record has the counts of the state that is being uploaded.
  if (first_weights_.complete()) status.update_counts = record_.update_counts;
  if (!first_weights_.complete()) status.inherited = inherited_;
  status.memory = need_;
  status.speculation_refused = speculation_refused_;
  status.speculation_paused = CanSpeculate() ? speculation_.paused() : 0;
  // Between steps all accumulators are free, so the number is that of the last step.
  status.accumulators_in_use = std::holds_alternative<std::monostate>(step_)
                                   ? last_accumulators_in_use_
                                   : gradients_->accumulators_in_use();
  const std::vector<RankInStep>* in_step = nullptr;
  // Each of the following that applies says more than what stands before it.
  status.phase = JobPhase::kReady;
  if (const auto* open = std::get_if<OpenStep>(&step_)) {
    status.phase = JobPhase::kOpen;
    status.seconds_open = open->SecondsSinceOpened();
    status.seconds_since_first_seal = open->SecondsSinceFirstSeal();
    in_step = &open->ranks();
  } else if (const auto* sealed = std::get_if<SealedStep>(&step_)) {
    status.phase = gate_.phase() == Phase::kVoting ? JobPhase::kVoting : JobPhase::kSealed;
    in_step = &sealed->ranks();
  } else if (const auto* decided = std::get_if<DecidedStep>(&step_)) {
    status.phase = JobPhase::kUpdating;
    in_step = &decided->ranks();
  }
  if (!first_weights_.complete()) status.phase = JobPhase::kAwaitingWeights;
  if (gate_.state().torn || broken()) {
    status.phase = JobPhase::kBroken;
    status.problem = std::string((broken() ? broken_ : StatusOf(Answer::kTorn)).message());
  }
  if (gate_.phase() == Phase::kClosed) status.phase = JobPhase::kClosed;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    status.ranks.push_back(ProgressOf(rank, in_step == nullptr ? nullptr : &(*in_step)[rank]));
  }
  status.rank_memory_bytes = RankMemoryBytesNow();
  status.saves = SavesUnderWay();
  status.save_counts = save_counts_;
  for (Activity& activity : environment_.activities->List()) {
    if (activity.job == spec().name) status.activities.push_back(std::move(activity));
  }
  return status;
}

int64_t JobImpl::RankMemoryBytesNow() const {
  int64_t bytes = 0;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].memory != nullptr) bytes += ranks_[rank].memory_bytes;
  }
  return bytes;
}

RankProgress JobImpl::ProgressOf(int rank, const RankInStep* state) const {
  const absl::Span<const int> chunks = layout_.chunks_of_rank(rank);
  RankProgress progress;
  progress.attached = !ranks_[rank].process_id.empty();
  progress.process_id = ranks_[rank].process_id;
  progress.shared_memory = ranks_[rank].memory != nullptr;
  progress.writes_state = writing_ != nullptr && writing_->HasEnded(rank);
  progress.chunks = static_cast<int64_t>(chunks.size());
  if (state == nullptr) return progress;
  progress.attempt = state->attempt;
  progress.begun = state->begun;
  progress.micro_steps_ended = state->micro_steps_ended;
  progress.sealed = state->sealed.has_value();
  progress.voted = state->vote.has_value();
  progress.furthest_micro_step = state->sealed.value_or(0);
  for (const int chunk : chunks) {
    progress.furthest_micro_step =
        std::max(progress.furthest_micro_step, ledger_.next_micro_step(chunk));
  }
  if (progress.furthest_micro_step == 0)
    return progress;  // Nothing has arrived, so nothing is behind.
  progress.chunks_complete = std::count_if(
      chunks.begin(), chunks.end(), [&](int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return ledger_.next_micro_step(chunk) == progress.furthest_micro_step;
      });
  progress.missing_parameters =
      NamesBehind(spec(), layout_, ledger_, rank, progress.furthest_micro_step);
  return progress;
}

}  // namespace ballast
