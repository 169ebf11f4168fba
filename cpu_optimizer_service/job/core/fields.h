// The fields of what a job keeps, and of what its members say to each other (host/kept_codec.h).
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_FIELDS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_FIELDS_H_

#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/step/step_machine.h"

namespace ballast {

// In the order in which they are stored or sent: another order, or one field more, is another format
// (kKeptFormat, kWordsFormat).
template <typename Each>
void Fields(Each&& each, HyperParameters& v) {
  each(v.rule);
  ForEachHyperParameter([&](const char*, auto& field) { each(field); }, v);
}
template <typename Each>
void Fields(Each&& each, HyperParameterOverrides& v) {
  ForEachHyperParameter([&](const char*, auto& field) { each(field); }, v);
}
template <typename Each>
void Fields(Each&& each, Decision& v) {
  each(v.apply, v.norm, v.clip_coefficient, v.multipliers);
}
template <typename Each>
void Fields(Each&& each, StepOutcome& v) {
  each(v.step, v.decision, v.skip_cause, v.skip_reason, v.unused_parameters, v.left);
}
template <typename Each>
void Fields(Each&& each, SpeculationCounts& v) {
  each(v.speculated, v.published, v.redone);
}
template <typename Each>
void Fields(Each&& each, Generation& v) {
  each(v.epoch, v.count);
}
template <typename Each>
void Fields(Each&& each, Clipping& v) {
  each(v.max_norm, v.multipliers);
}
template <typename Each>
void Fields(Each&& each, StepTimes& v) {
  each(v.gathering, v.awaiting, v.deciding, v.updating);
}
template <typename Each>
void Fields(Each&& each, DurationHistogram& v) {
  each(v.counts, v.sum_seconds);
}
template <typename Each>
void Fields(Each&& each, StepStatistics& v) {
  each(v.clipped_steps, v.skips, v.gathering, v.awaiting, v.deciding, v.updating);
}
template <typename Each>
void Fields(Each&& each, StepVote& v) {
  each(v.apply, v.clipping, v.overrides, v.trainer_state);
}
template <typename Each>
void Fields(Each&& each, StepRecord& v) {
  each(v.outcome, v.speculation, v.micro_steps, v.loss_scale, v.times, v.voted, v.abandoned,
       v.hyper_parameters);
}
template <typename Each>
void Fields(Each&& each, StepHistory& v) {
  each(v.recent_steps, v.applied_steps, v.skipped_steps, v.coverage_complete_steps, v.speculation,
       v.statistics);
}
template <typename Each>
void Fields(Each&& each, PreviousState& v) {
  each(v.committed_step, v.applied, v.hyper_parameters, v.update_counts, v.trainer_state);
}
template <typename Each>
void Fields(Each&& each, GradientScale& v) {
  each(v.loss_scale, v.divisors);
}
template <typename Each>
void Fields(Each&& each, StepSettings& v) {
  each(v.scale, v.overrides, v.trainer_state, v.expected_clipping);
}
template <typename Each>
void Fields(Each&& each, StepTerms& v) {
  each(v.step, v.settings, v.hyper_parameters);
}
template <typename Each>
void Fields(Each&& each, UsedParameters::NonFinite& v) {
  each(v.parameter, v.element, v.value);
}
template <typename Each>
void Fields(Each&& each, UsedParameters& v) {
  each(v.all, v.parameters, v.non_finite);
}
template <typename Each>
void Fields(Each&& each, Placement& v) {
  each(v.shard_dim);
}
template <typename Each>
void Fields(Each&& each, MeshDim& v) {
  each(v.name, v.size);
}
template <typename Each>
void Fields(Each&& each, ParameterSpec& v) {
  each(v.name, v.shape, v.group, v.trainable, v.placements);
}
template <typename Each>
void Fields(Each&& each, PartitionRange& v) {
  each(v.rank, v.group, v.begin, v.end);
}
template <typename Each>
void Fields(Each&& each, StateSpec& v) {
  each(v.format, v.fallback);
}
template <typename Each>
void Fields(Each&& each, LayoutSpec& v) {
  each(v.world_size, v.group_count, v.parameters, v.mesh, v.partitions, v.chunk_elements, v.states);
}
template <typename Each>
void Fields(Each&& each, GroupSpec& v) {
  each(v.name, v.hyper_parameters, v.wire_dtype, v.return_dtype);
}
template <typename Each>
void Fields(Each&& each, MemberSpec& v) {
  each(v.address);
}
template <typename Each>
void Fields(Each&& each, JobSpec& v) {
  each(v.name, v.groups, v.layout, v.on_abort, v.unused_policy, v.max_micro_steps, v.update_mode,
       v.keep_previous, v.newton_schulz, v.members, v.homes, v.epoch);
}
template <typename Each>
void Fields(Each&& each, Derivation& v) {
  each(v.uid, v.checkpoint);
}
template <typename Each>
void Fields(Each&& each, JobIdentity& v) {
  each(v.uid, v.spec, v.derivation, v.member, v.lead_principal, v.creation);
}

template <typename Each>
void Fields(Each&& each, SecondDecision& v) {
  each(v.left, v.why);
}
template <typename Each>
void Fields(Each&& each, KeptDirections& v) {
  each(v.record, v.coverage_complete, v.update_counts, v.is_by_service, v.second);
}
template <typename Each>
void Fields(Each&& each, KeptDecision& v) {
  each(v.outcome, v.terms, v.vote, v.attempt, v.micro_steps, v.coverage_complete,
       v.hyper_parameters, v.update_counts, v.values_after, v.group_norms, v.speculation,
       v.reports);
}
template <typename Each>
void Fields(Each&& each, KeptReport& v) {
  each(v.number, v.attempt, v.micro_steps, v.vote);
}
template <typename Each>
void Fields(Each&& each, KeptLoad& v) {
  each(v.path, v.weights_only, v.loads, v.sha256);
}
template <typename Each>
void Fields(Each&& each, StateWrite& v) {
  each(v.step, v.number, v.planes, v.parameters, v.update_counts);
}
template <typename Each>
void Fields(Each&& each, KeptWrite& v) {
  each(v.write, v.memory);
}
template <typename Each>
void Fields(Each&& each, StepWord& v) {
  each(v.kind, v.rank, v.step, v.settings, v.terms, v.micro_step, v.used, v.chunk, v.begin, v.end,
       v.attempt);
}
template <typename Each>
void Fields(Each&& each, UndoneStep& v) {
  each(v.step, v.generation, v.loads);
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_FIELDS_H_
