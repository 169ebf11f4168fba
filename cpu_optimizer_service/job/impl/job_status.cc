// The picture of a job that others are shown.
#include <algorithm>
#include <optional>
#include <vector>

#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

std::optional<double> StepClock::SecondsSinceFirstSeal() const {
  if (!first_seal.has_value()) return std::nullopt;
  return SecondsSince(*first_seal);
}

StepTimes StepClock::TimesUntilNow() const {
  const auto seconds = [](Time from, Time to) {
    return std::chrono::duration<double>(to - from).count();
  };
  const Time waited = first_seal.value_or(sealed);
  return {.gathering = seconds(opened, waited),
          .awaiting = seconds(waited, sealed),
          .deciding = seconds(sealed, decided),
          .updating = SecondsSince(decided)};
}

Attachment JobImpl::Position() const {
  JobCore::Lock lock(core_);
  return PositionNow();
}

Attachment JobImpl::PositionNow() const {
  return {.generation = core_.record.generation,
          .committed_step = committed_step(),
          .awaiting_weights = !core_.first_weights.complete()};
}

Job::Use JobImpl::use() const {
  JobCore::Lock lock(core_);
  return UseNow();
}

Job::Use JobImpl::UseNow() const {
  Use use = {.changes = journal_.changes()};
  for (int rank = 0; rank < members_.table.size(); ++rank) {
    if (members_.table[rank].listener != nullptr) ++use.streams;
  }
  return use;
}

JobStatus JobImpl::Status() const {
  JobCore::Lock lock(core_);
  JobStatus status;
  status.generation = core_.record.generation;
  status.committed_step = committed_step();
  status.state_writes = core_.record.state_writes;
  if (core_.record.previous.has_value()) status.undoable_step = core_.record.committed_step;
  status.applied_steps = core_.record.history.applied_steps;
  status.skipped_steps = core_.record.history.skipped_steps;
  status.coverage_complete_steps = core_.record.history.coverage_complete_steps;
  status.speculation = core_.record.history.speculation;
  status.statistics = core_.record.history.statistics;
  status.traffic = core_.traffic.total();
  status.gate = core_.gate.ToString();
  status.recent_steps.assign(core_.record.history.recent_steps.begin(),
                             core_.record.history.recent_steps.end());
  if (core_.record.directions.has_value()) {
    status.recent_steps.push_back(core_.record.directions->record);
    if (status.recent_steps.size() > kRecentSteps) {
      status.recent_steps.erase(status.recent_steps.begin());
    }
  }
  status.latest = core_.history.Latest();
  status.trainer_state = core_.record.trainer_state;
  status.resumed_uid = core_.record.resumed_uid;
  status.ancestors = core_.record.ancestors;
  status.hyper_parameters = core_.record.hyper_parameters;
  status.update_counts.resize(core_.record.update_counts.size());
  // While first weights are awaited the record has the counts of the state that is being uploaded.
  if (core_.first_weights.complete()) status.update_counts = core_.record.update_counts;
  if (!core_.first_weights.complete()) status.inherited = origin_.inherited();
  status.memory = memory_.need;
  status.speculation_refused = memory_.speculation_refused;
  status.speculation_paused = executor_.CanSpeculate() ? executor_.chunks_paused() : 0;
  // Between steps all accumulators are free, so the number is that of the last step.
  status.accumulators_in_use = machine_.between_steps() ? last_accumulators_in_use_
                                                        : memory_.gradients->accumulators_in_use();
  // Each of the following that applies says more than what stands before it.
  switch (machine_.stage()) {
    case StepMachine::Stage::kNone:
      // A step that an earlier process decided may be carried out.
      status.phase = core_.gate.phase() == Phase::kUpdating     ? JobPhase::kUpdating
                     : core_.gate.phase() == Phase::kDirections ? JobPhase::kDirections
                                                                : JobPhase::kReady;
      status.seconds_since_first_seal = SecondsSinceFirstGiven();
      break;
    case StepMachine::Stage::kOpen:
      status.phase = JobPhase::kOpen;
      status.seconds_open = SecondsSince(clock_.opened);
      status.seconds_since_first_seal = clock_.SecondsSinceFirstSeal();
      break;
    case StepMachine::Stage::kSealed:
      status.phase = JobPhase::kSealed;
      break;
    case StepMachine::Stage::kReported:
      status.phase = JobPhase::kVoting;
      break;
    case StepMachine::Stage::kDecided:
      status.phase = JobPhase::kUpdating;
      break;
  }
  if (!core_.first_weights.complete()) status.phase = JobPhase::kAwaitingWeights;
  if (!other_states_.ok()) {
    status.phase = JobPhase::kBroken;
    status.problem = std::string(other_states_.message());
  }
  if (core_.gate.state().torn) {
    status.phase = JobPhase::kBroken;
    status.problem = std::string(core_.StatusOf(Answer::kTorn).message());
  }
  if (core_.gate.phase() == Phase::kClosed) status.phase = JobPhase::kClosed;
  if (core_.record.superseded_by != 0) {
    status.phase = JobPhase::kBroken;
    status.problem = std::string(core_.StatusOf(Answer::kClosed).message());
  }
  for (int rank = 0; rank < members_.table.size(); ++rank) {
    status.ranks.push_back(ProgressOf(rank));
  }
  AddMembers(status);
  status.rank_memory_bytes = RankMemoryBytesNow();
  status.saves = saver_.UnderWay();
  status.save_counts = saver_.counts();
  for (Activity& activity : core_.environment.activities->List()) {
    if (activity.job == spec().name) status.activities.push_back(std::move(activity));
  }
  return status;
}

int64_t JobImpl::RankMemoryBytesNow() const {
  int64_t bytes = 0;
  for (int rank = 0; rank < members_.table.size(); ++rank) {
    if (members_.table[rank].memory != nullptr) bytes += members_.table[rank].memory_bytes;
  }
  return bytes;
}

RankProgress JobImpl::ProgressOf(int rank) const {
  const absl::Span<const int> chunks = core_.layout.chunks_of_rank(rank);
  RankProgress progress;
  const RankEntry& entry = members_.table[rank];
  progress.attached = !entry.process_id.empty();
  progress.left = entry.left;
  progress.process_id = entry.process_id;
  progress.shared_memory = entry.memory != nullptr;
  progress.writes_state = writes_.HasEnded(rank);
  progress.chunks = static_cast<int64_t>(chunks.size());
  progress.orthogonalizes = core_.gate.phase() == Phase::kDirections && orthogonal_.Awaits(rank);
  if (machine_.between_steps()) return progress;
  const RankInStep* const state = &machine_.agreement()->ranks()[rank];
  progress.attempt = state->attempt;
  progress.begun = state->begun;
  progress.micro_steps_ended = machine_.part().rank(rank).micro_steps_ended;
  progress.sealed = state->sealed.has_value();
  progress.voted = state->vote.has_value();
  progress.furthest_micro_step = state->sealed.value_or(0);
  for (const int chunk : chunks) {
    progress.furthest_micro_step =
        std::max(progress.furthest_micro_step, machine_.ledger().next_micro_step(chunk));
  }
  if (progress.furthest_micro_step == 0)
    return progress;  // Nothing has arrived, so nothing is behind.
  progress.chunks_complete = std::count_if(
      chunks.begin(), chunks.end(), [&](int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
        return machine_.ledger().next_micro_step(chunk) == progress.furthest_micro_step;
      });
  progress.missing_parameters =
      NamesBehind(spec(), core_.layout, machine_.ledger(), rank, progress.furthest_micro_step);
  return progress;
}

}  // namespace ballast
