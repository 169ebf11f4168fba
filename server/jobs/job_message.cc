#include "server/jobs/job_message.h"

#include <algorithm>
#include <limits>

#include "cpu_optimizer_service/job/job.h"
#include "proto/convert.h"

namespace ballast::server {
namespace {

v1::StepRecord StepMessage(const StepRecord& record) {
  v1::StepRecord message;
  message.set_step(record.outcome.step);
  message.set_applied(record.outcome.decision.apply);
  message.set_norm(record.outcome.decision.norm);
  message.set_clip_coefficient(record.outcome.decision.clip_coefficient);
  message.set_skip_reason(record.outcome.skip_reason);
  message.set_left(record.outcome.left);
  message.set_micro_steps(record.micro_steps);
  message.set_loss_scale(record.loss_scale);
  message.set_speculated_chunks(record.speculation.speculated);
  message.set_published_chunks(record.speculation.published);
  message.set_redone_chunks(record.speculation.redone);
  const std::vector<float>& multipliers = record.outcome.decision.multipliers;
  message.mutable_multipliers()->Add(multipliers.begin(), multipliers.end());
  *message.mutable_voted() = proto::ToProto(record.voted);
  message.set_abandoned(record.abandoned);
  message.set_seconds(record.times.total());
  const std::vector<std::string>& unused = record.outcome.unused_parameters;
  message.mutable_unused_parameters()->Add(unused.begin(), unused.end());
  for (const HyperParameters& values : record.hyper_parameters) {
    *message.add_hyper_parameters() = proto::ToProto(values);
  }
  return message;
}

void AddMemory(const JobStatus& status, v1::MemoryUse& memory) {
  memory.set_total_bytes(status.memory.total_bytes());
  memory.set_state_bytes(status.memory.state_bytes);
  memory.set_gradient_bytes(status.memory.gradient_bytes);
  memory.set_accumulator_bytes(status.memory.accumulator_bytes);
  memory.set_accumulators_in_use(status.accumulators_in_use);
  memory.set_speculation_bytes(status.memory.speculation_bytes);
  memory.set_previous_bytes(status.memory.previous_bytes);
  memory.set_shared_bytes(status.rank_memory_bytes);
}

void AddSpeculation(const JobStatus& status, v1::Speculation& speculation) {
  speculation.set_unavailable(status.speculation_refused);
  speculation.set_speculated_chunks(status.speculation.speculated);
  speculation.set_published_chunks(status.speculation.published);
  speculation.set_redone_chunks(status.speculation.redone);
  speculation.set_paused_chunks(status.speculation_paused);
}

// Of the ranks whose home is here.
void AddRanks(const Layout& layout, const JobStatus& status, v1::Job& message) {
  message.set_home_ranks(static_cast<int32_t>(layout.ranks().size()));
  for (const int rank : layout.ranks()) {
    const RankProgress& from = status.ranks[rank];
    v1::RankProgress& to = *message.add_ranks();
    to.set_rank(rank);
    to.set_attached(from.attached);
    to.set_left(from.left);
    to.set_process_id(from.process_id);
    to.set_attempt(from.attempt);
    to.set_begun(from.begun);
    to.set_micro_steps_ended(from.micro_steps_ended);
    to.set_sealed(from.sealed);
    to.set_voted(from.voted);
    to.set_chunks(from.chunks);
    to.set_chunks_complete(from.chunks_complete);
    to.set_furthest_micro_step(from.furthest_micro_step);
    to.mutable_missing_parameters()->Add(from.missing_parameters.begin(),
                                         from.missing_parameters.end());
    to.set_shared_memory(from.shared_memory);
    to.set_writes_state(from.writes_state);
    to.set_orthogonalizes(from.orthogonalizes);
  }
}

void AddSaves(const JobStatus& status, v1::Job& message) {
  for (const SaveProgress& from : status.saves) {
    v1::SaveProgress& to = *message.add_saves();
    to.set_directory(from.directory);
    to.set_step(from.step);
    to.set_seconds(from.seconds);
    to.set_seconds_since_progress(from.seconds_since_progress);
    to.set_written_bytes(from.written_bytes);
    to.set_size_bytes(from.size_bytes);
    to.set_holds_back_decisions(from.holds_back_decisions);
    to.set_makes_memory(from.makes_memory);
  }
}

constexpr int kMostInFp32 = 8;  // That a group names.

void AddGroups(const Job& job, const JobStatus& status, v1::Job& message) {
  for (int group = 0; group < message.groups_size(); ++group) {
    v1::ParamGroup& to = *message.mutable_groups(group);
    *to.mutable_hyper_parameters() = proto::ToProto(status.hyper_parameters[group]);
    to.set_flat_elements(job.layout().flat_elements(group));
  }
  const std::vector<ParameterSpec>& parameters = job.spec().layout.parameters;
  for (size_t p = 0; p < parameters.size(); ++p) {
    v1::ParamGroup& to = *message.mutable_groups(parameters[p].group);
    to.set_parameter_count(to.parameter_count() + 1);
    if (!parameters[p].trainable) continue;
    to.set_trainable_elements(to.trainable_elements() +
                              job.layout().place(static_cast<int>(p)).elements);
    if (to.in_fp32_size() < kMostInFp32 && job.layout().fell_back(static_cast<int>(p))) {
      to.add_in_fp32(parameters[p].name);
    }
  }
}

// Of a job that are shown. Each may name a directory.
constexpr int kMostActivities = 4;

// A negative number has the longest varint.
constexpr int kLongest = -1;
constexpr double kAnyDouble = 1;  // Doubles that are not 0 are all the same size.

size_t LongestName(const JobSpec& spec) {
  size_t bytes = 0;
  for (const ParameterSpec& parameter : spec.layout.parameters) {
    bytes = std::max(bytes, parameter.name.size());
  }
  return bytes;
}

// All that AddRanks sets, as large as it can be; what is added there is to be added here.
v1::RankProgress LargestRank(size_t name_bytes) {
  v1::RankProgress rank;
  rank.set_rank(kLongest);
  rank.set_attached(true);
  rank.set_left(true);
  rank.set_process_id(std::string(kMaxProcessIdBytes, 'p'));
  rank.set_attempt(std::numeric_limits<uint32_t>::max());
  rank.set_begun(true);
  rank.set_micro_steps_ended(std::numeric_limits<uint32_t>::max());
  rank.set_sealed(true);
  rank.set_voted(true);
  rank.set_chunks(kLongest);
  rank.set_chunks_complete(kLongest);
  rank.set_furthest_micro_step(std::numeric_limits<uint32_t>::max());
  rank.set_shared_memory(true);
  rank.set_writes_state(true);
  rank.set_orthogonalizes(true);
  for (size_t i = 0; i < kMissingNames; ++i) {
    rank.add_missing_parameters(std::string(name_bytes, 'p'));
  }
  return rank;
}

// The same of StepMessage.
v1::StepRecord LargestRecord(const JobSpec& spec) {
  constexpr size_t kReasonBytes = 256;  // In addition to the name of a parameter.
  const size_t name_bytes = LongestName(spec);
  v1::StepRecord record;
  record.set_step(std::numeric_limits<uint64_t>::max());
  record.set_applied(true);
  record.set_norm(kAnyDouble);
  record.set_clip_coefficient(kAnyDouble);
  record.set_micro_steps(std::numeric_limits<uint32_t>::max());
  record.set_loss_scale(kAnyDouble);
  record.set_skip_reason(std::string(name_bytes + kReasonBytes, 'r'));
  record.set_speculated_chunks(kLongest);
  record.set_published_chunks(kLongest);
  record.set_redone_chunks(kLongest);
  for (size_t i = 0; i < kRecordedNames; ++i) {
    record.add_unused_parameters(std::string(name_bytes, 'p'));
  }
  for (const GroupSpec& group : spec.groups) {
    *record.add_hyper_parameters() = proto::ToProto(group.hyper_parameters);
    record.add_multipliers(1);
    record.mutable_voted()->add_multipliers(kAnyDouble);
  }
  record.mutable_voted()->set_max_norm(kAnyDouble);
  record.set_abandoned(true);
  record.set_seconds(kAnyDouble);
  return record;
}

}  // namespace

v1::JobPhase ToMessage(JobPhase phase) {
  switch (phase) {
    case JobPhase::kAwaitingWeights:
      return v1::AWAITING_WEIGHTS;
    case JobPhase::kReady:
      return v1::READY;
    case JobPhase::kOpen:
      return v1::OPEN;
    case JobPhase::kSealed:
      return v1::SEALED;
    case JobPhase::kVoting:
      return v1::VOTING;
    case JobPhase::kUpdating:
      return v1::UPDATING;
    case JobPhase::kDirections:
      return v1::DIRECTIONS;
    case JobPhase::kBroken:
      return v1::BROKEN;
    case JobPhase::kClosed:
      return v1::CLOSED;
  }
  return v1::JOB_PHASE_UNSPECIFIED;
}

size_t LargestMessageBytes(const JobSpec& spec) {
  constexpr size_t kEntryBytes = 8;  // Tag and length of an entry of a list.
  // Ids, counts, memory, why it is broken, and the rest of an AttachWorkerResponse.
  constexpr size_t kOthersBytes = 2048 + kMostAncestors * (kJobUidCharacters + 8);
  // Of saves and other work that is under way, of a checkpoint that was found, and of one of which a load did not
  // end: the path of a directory has at most 4096 bytes.
  // Saves that were asked for and others have kMostSaves each.
  constexpr size_t kPathsBytes = (2 * kMostSaves + kMostActivities + 2) * (4096 + 256);
  v1::Job message = proto::ToProto(spec);
  for (v1::Parameter& parameter : *message.mutable_parameters()) {
    parameter.set_offset(kLongest);
    parameter.set_update_count(kLongest);
    parameter.set_inherited(true);
    parameter.set_state(v1::STATE_8BIT);
  }
  for (v1::ParamGroup& group : *message.mutable_groups()) {
    group.set_flat_elements(kLongest);
    group.set_parameter_count(kLongest);
    group.set_trainable_elements(kLongest);
    for (int i = 0; i < kMostInFp32; ++i) group.add_in_fp32(std::string(LongestName(spec), 'p'));
  }
  // Nobody has checked the description yet: this is what the caller says.
  const size_t ranks = std::clamp(spec.layout.world_size, 0, kMaxWorldSize);
  const size_t rank_bytes = LargestRank(LongestName(spec)).ByteSizeLong() + kEntryBytes;
  const size_t record_bytes = LargestRecord(spec).ByteSizeLong() + kEntryBytes;
  return message.ByteSizeLong() + ranks * rank_bytes + kRecentSteps * record_bytes +
         kMaxTrainerStateBytes + kPathsBytes + kOthersBytes;
}

bool AddFoundCheckpoint(const Engine& engine, const Job& job, v1::Job& message) {
  if (engine.checkpoints() == nullptr) return false;
  const std::optional<CheckpointFacts> found = engine.checkpoints()->Find(job.spec().name);
  if (!found.has_value()) return false;
  message.mutable_found_checkpoint()->set_directory(found->directory);
  message.mutable_found_checkpoint()->set_step(found->step);
  message.mutable_found_checkpoint()->set_uid(found->uid);
  const CheckpointDirectory::Total total = engine.checkpoints()->TotalOf(job.spec().name);
  message.mutable_found_checkpoint()->set_checkpoints(total.checkpoints);
  message.mutable_found_checkpoint()->set_total_bytes(total.bytes);
  return true;
}

v1::Job ToMessage(const Engine& engine, const Job& job, bool with_parameters) {
  const JobStatus status = job.Status();
  v1::Job message = proto::ToProto(job.spec(), with_parameters);
  message.set_uid(job.uid());
  message.set_instance_id(engine.instance_id());
  *message.mutable_generation() = proto::ToProto(status.generation);
  message.set_committed_step(status.committed_step);
  message.set_undoable_step(status.undoable_step);
  message.set_state_writes(status.state_writes);
  message.mutable_ancestors()->Add(status.ancestors.begin(), status.ancestors.end());
  message.set_phase(ToMessage(status.phase));
  message.set_problem(status.problem);
  message.set_waits_for(status.waits_for);
  for (size_t member = 0; member < status.members.size(); ++member) {
    const MemberStatus& known = status.members[member];
    v1::JobMember& shown = *message.mutable_members(static_cast<int>(member));
    shown.set_linked(known.is_linked);
    shown.set_seconds_without_link(known.seconds_without_link);
    shown.set_problem(known.problem);
    shown.set_waited_for(known.waited_for);
    shown.set_memory_bytes(known.memory_bytes);
    shown.set_round_trip_seconds(known.round_trip_seconds);
  }
  message.set_answering_member(status.member);
  message.set_applied_steps(status.applied_steps);
  message.set_skipped_steps(status.skipped_steps);
  message.set_coverage_complete_steps(status.coverage_complete_steps);
  message.set_not_kept_steps(status.statistics.not_kept_steps());
  message.set_clipped_steps(static_cast<uint64_t>(status.statistics.clipped_steps));
  message.set_seconds_open(status.seconds_open.value_or(0));
  message.set_seconds_since_first_seal(status.seconds_since_first_seal.value_or(0));
  message.set_attached_ranks(static_cast<int32_t>(std::count_if(
      status.ranks.begin(), status.ranks.end(), [](const auto& rank) { return rank.attached; })));
  message.set_parameter_count(static_cast<int64_t>(job.spec().layout.parameters.size()));
  message.set_chunk_count(static_cast<int64_t>(job.layout().chunks().size()));
  message.set_gradient_bytes(status.traffic.gradient_bytes_in_messages +
                             status.traffic.gradient_bytes_in_place);
  message.set_weight_bytes(status.traffic.weight_bytes_in_messages +
                           status.traffic.weight_bytes_in_place);
  message.set_trainer_state(status.trainer_state);
  message.set_resumed_uid(status.resumed_uid);
  AddMemory(status, *message.mutable_memory());
  AddSpeculation(status, *message.mutable_speculation());
  AddRanks(job.layout(), status, message);
  AddSaves(status, message);
  for (const Activity& activity : status.activities) {
    if (message.activities_size() == kMostActivities) break;  // More loads may be queued.
    *message.add_activities() = proto::ToProto(activity);
  }
  // Whoever begins a job, or has to mend a broken one, needs to know what it can go on from.
  if (status.phase == JobPhase::kBroken || status.phase == JobPhase::kAwaitingWeights) {
    AddFoundCheckpoint(engine, job, message);
  }
  AddGroups(job, status, message);
  for (const StepRecord& record : status.recent_steps) {
    *message.add_recent_steps() = StepMessage(record);
  }
  for (int p = 0; p < message.parameters_size(); ++p) {
    message.mutable_parameters(p)->set_offset(job.layout().place(p).offset);
    message.mutable_parameters(p)->set_state(proto::ToProto(job.layout().format(p)));
    message.mutable_parameters(p)->set_update_count(status.update_counts[p]);
    if (!status.inherited.empty()) {
      message.mutable_parameters(p)->set_inherited(status.inherited[p]);
    }
  }
  return message;
}

v1::Job CreatingMessage(const Engine& engine, const Job& job) {
  v1::Job message = proto::ToProto(job.spec(), /*with_parameters=*/false);
  message.set_uid(job.uid());
  message.set_instance_id(engine.instance_id());
  message.set_phase(v1::CREATING);
  message.set_waits_for(job.CreationWaitsFor());
  for (const Activity& activity : engine.ListActivities()) {
    if (activity.job == job.spec().name) *message.add_activities() = proto::ToProto(activity);
  }
  return message;
}

v1::ParamGroup ToMessage(const Job& job, int group, const HyperParameters& values) {
  v1::Job message = proto::ToProto(job.spec(), /*with_parameters=*/false);
  AddGroups(job, job.Status(), message);
  v1::ParamGroup result = std::move(*message.mutable_groups(group));
  *result.mutable_hyper_parameters() = proto::ToProto(values);
  return result;
}

}  // namespace ballast::server
