#include "cpu_optimizer_service/job/state/index_record.h"

#include <chrono>

namespace ballast {

StepRecord WithGroups(const StepRecord& of, absl::Span<const CheckpointIndex::Group> groups,
                      const JobCore& core) {
  StepRecord record = of;
  // They may be in another order, and some that the job has not.
  const auto of_job = [&](const auto& theirs, const auto& otherwise, auto& values) {
    if (theirs.empty()) return;
    values.assign(core.layout.group_count(), otherwise);
    for (int group = 0; group < core.layout.group_count(); ++group) {
      for (size_t i = 0; i < groups.size(); ++i) {
        if (groups[i].name == core.spec().groups[group].name) values[group] = theirs[i];
      }
    }
  };
  of_job(of.hyper_parameters, HyperParameters(), record.hyper_parameters);
  of_job(of.outcome.decision.multipliers, 1, record.outcome.decision.multipliers);
  of_job(of.voted.multipliers, 1, record.voted.multipliers);
  return record;
}

void TakeRecord(const CheckpointIndex& index, JobCore& core, ChunkStore& store, Saver& saver) {
  core.record.committed_step = index.step;
  // Previous versions are of what was replaced, and so there is nothing to undo.
  core.record.previous.reset();
  core.record.last_decision.reset();
  core.record.last_vote = {};
  saver.schedule.SavedAt(index.step, std::chrono::steady_clock::now());
  core.record.resumed_uid = index.uid;
  core.record.trainer_state = index.trainer_state;
  core.history.Clear();
  core.record.history.Replace(nullptr);
  if (index.last_step.has_value()) {
    const StepRecord last = WithGroups(*index.last_step, index.groups, core);
    core.record.history.Replace(&last);
    core.history.AddEarlier(last);
  }
  store.SetStep(index.step);
  for (const CheckpointIndex::Parameter& saved : index.parameters) {
    const int p = core.layout.FindParameter(saved.name);
    if (p != -1) core.record.update_counts[p] = saved.update_count;
  }
  for (int group = 0; group < core.layout.group_count(); ++group) {
    for (const CheckpointIndex::Group& saved : index.groups) {
      if (saved.name == core.spec().groups[group].name) {
        core.record.hyper_parameters[group] = saved.hyper_parameters;
      }
    }
  }
}

}  // namespace ballast
