#include "proto/convert.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::proto {
namespace {

constexpr absl::string_view kJobs = "jobs/";
constexpr absl::string_view kGroups = "/groups/";
constexpr absl::string_view kParameters = "/parameters/";

// `name` without `prefix` if it begins with it, otherwise `name`.
std::string WithoutPrefix(absl::string_view name, absl::string_view prefix) {
  // Requests may give full names or short ones.
  return std::string(absl::StartsWith(name, prefix) ? name.substr(prefix.size()) : name);
}

absl::StatusOr<DType> FromProto(v1::DType dtype, absl::string_view what) {
  switch (dtype) {
    // Each enum has a default, which an absent field means.
    case v1::DTYPE_UNSPECIFIED:
    case v1::BF16:
      return DType::kBFloat16;
    case v1::FP16:
      return DType::kFloat16;
    case v1::FP32:
      return DType::kFloat32;
    // proto3 keeps numbers that it has no name for, such as those of a later client.
    default:
      return absl::InvalidArgumentError(absl::StrCat(what, " is ", static_cast<int>(dtype),
                                                     ", which is none of BF16, FP16, FP32"));
  }
}

absl::StatusOr<UnusedPolicy> FromProto(v1::UnusedPolicy policy) {
  switch (policy) {
    case v1::UNUSED_POLICY_UNSPECIFIED:
    case v1::ERROR:
      return UnusedPolicy::kError;
    case v1::SKIP:
      return UnusedPolicy::kSkip;
    case v1::ZERO:
      return UnusedPolicy::kZero;
    default:
      return absl::InvalidArgumentError(absl::StrCat("unused_policy is ", static_cast<int>(policy),
                                                     ", which is none of ERROR, SKIP, ZERO"));
  }
}

v1::UnusedPolicy ToProto(UnusedPolicy policy) {
  switch (policy) {
    case UnusedPolicy::kError:
      return v1::ERROR;
    case UnusedPolicy::kSkip:
      return v1::SKIP;
    case UnusedPolicy::kZero:
      return v1::ZERO;
  }
  return v1::UNUSED_POLICY_UNSPECIFIED;
}

absl::StatusOr<OnAbort> FromProto(v1::OnAbort on_abort) {
  switch (on_abort) {
    case v1::ON_ABORT_UNSPECIFIED:
    case v1::REDO_STEP:
      return OnAbort::kRedo;
    case v1::SKIP_STEP:
      return OnAbort::kSkip;
    default:
      return absl::InvalidArgumentError(absl::StrCat("on_abort is ", static_cast<int>(on_abort),
                                                     ", which is not REDO_STEP or SKIP_STEP"));
  }
}

absl::StatusOr<GroupSpec> GroupFromProto(const v1::ParamGroup& group, const std::string& job) {
  GroupSpec spec;
  // The full name of another job's group keeps its slashes, and is refused for them later
  // (job_spec.cc).
  spec.name = WithoutPrefix(group.name(), GroupName(job, ""));
  const std::string what = absl::StrCat("group '", spec.name, "'");
  absl::StatusOr<HyperParameters> values = FullFromProto(group.hyper_parameters());
  if (!values.ok()) return Annotate(values.status(), what);
  spec.hyper_parameters = *values;
  BALLAST_ASSIGN_OR_RETURN(spec.wire_dtype,
                           FromProto(group.wire_dtype(), absl::StrCat(what, ": wire_dtype")));
  BALLAST_ASSIGN_OR_RETURN(spec.return_dtype,
                           FromProto(group.return_dtype(), absl::StrCat(what, ": return_dtype")));
  return spec;
}

std::vector<Placement> PlacementsFromProto(const v1::Parameter& parameter) {
  std::vector<Placement> placements;
  for (const int32_t dim : parameter.placements()) placements.push_back({.shard_dim = dim});
  return placements;
}

ParameterSpec ParameterFromProto(const v1::Parameter& parameter, const std::string& prefix) {
  return {.name = WithoutPrefix(parameter.name(), prefix),
          .shape = {parameter.shape().begin(), parameter.shape().end()},
          .group = parameter.group(),
          .trainable = parameter.trainable(),
          .placements = PlacementsFromProto(parameter)};
}

void AddLayout(const JobSpec& spec, v1::Job& job) {
  for (const ParameterSpec& from : spec.layout.parameters) {
    v1::Parameter& to = *job.add_parameters();
    to.set_name(ParameterName(spec.name, from.name));
    to.mutable_shape()->Add(from.shape.begin(), from.shape.end());
    to.set_group(from.group);
    to.set_trainable(from.trainable);
    for (const Placement& placement : from.placements) to.add_placements(placement.shard_dim);
  }
  for (const MeshDim& from : spec.layout.mesh) {
    v1::MeshDim& to = *job.add_mesh();
    to.set_name(from.name);
    to.set_size(from.size);
  }
  for (const PartitionRange& from : spec.layout.partitions) {
    v1::PartitionRange& to = *job.add_partitions();
    to.set_rank(from.rank);
    to.set_group(from.group);
    to.set_begin(from.begin);
    to.set_end(from.end);
  }
}

// A job's name if `collection` is empty, otherwise the name of its child in the collection. A
// child's name may have slashes, a job's may not.
absl::StatusOr<ResourceName> ParseChild(absl::string_view name, absl::string_view collection,
                                        absl::string_view form) {
  // The name is cut: a client may send one as long as a message.
  const auto malformed = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a name like ", form, ", got '", name.substr(0, 200), "'"));
  };
  if (!absl::StartsWith(name, kJobs)) return malformed();
  const absl::string_view rest = name.substr(kJobs.size());
  const size_t job_end = rest.find('/');
  if (collection.empty()) {
    if (rest.empty() || job_end != absl::string_view::npos) return malformed();
    return ResourceName{.job = std::string(rest), .child = ""};
  }
  if (job_end == 0 || job_end == absl::string_view::npos) return malformed();
  // `child` begins with its slash, as `collection` does.
  const absl::string_view child = rest.substr(job_end);
  if (!absl::StartsWith(child, collection) || child.size() == collection.size()) return malformed();
  return ResourceName{.job = std::string(rest.substr(0, job_end)),
                      .child = std::string(child.substr(collection.size()))};
}

}  // namespace

v1::Clipping ToProto(const Clipping& clipping) {
  v1::Clipping out;
  out.set_max_norm(clipping.max_norm);
  out.mutable_multipliers()->Add(clipping.multipliers.begin(), clipping.multipliers.end());
  return out;
}

Clipping FromProto(const v1::Clipping& clipping) {
  return {.max_norm = clipping.max_norm(),
          .multipliers = {clipping.multipliers().begin(), clipping.multipliers().end()}};
}

v1::RankReport ToProto(const RankReport& report) {
  v1::RankReport out;
  out.mutable_numbers()->insert(report.numbers.begin(), report.numbers.end());
  if (report.seconds.has_value()) {
    v1::RankSeconds& seconds = *out.mutable_seconds();
    seconds.set_compute(report.seconds->compute);
    seconds.set_reduce(report.seconds->reduce);
    seconds.set_send(report.seconds->send);
    seconds.set_wait(report.seconds->wait);
  }
  return out;
}

RankReport FromProto(const v1::RankReport& report) {
  RankReport out;
  out.numbers.insert(report.numbers().begin(), report.numbers().end());
  if (report.has_seconds()) {
    out.seconds = {.compute = report.seconds().compute(),
                   .reduce = report.seconds().reduce(),
                   .send = report.seconds().send(),
                   .wait = report.seconds().wait()};
  }
  return out;
}

v1::Activity ToProto(const Activity& activity) {
  v1::Activity message;
  // Without the kind 0, which says nothing, they have the same numbers.
  static_assert(v1::MAKING_MEMORY == static_cast<int>(ActivityKind::kMakingMemory) + 1);
  static_assert(v1::LOADING_CHECKPOINT == static_cast<int>(ActivityKind::kLoadingCheckpoint) + 1);
  message.set_kind(static_cast<v1::ActivityKind>(static_cast<int>(activity.kind) + 1));
  if (!activity.job.empty()) message.set_job(JobName(activity.job));
  message.set_directory(activity.directory);
  message.set_done_bytes(activity.done_bytes);
  message.set_total_bytes(activity.total_bytes);
  message.set_seconds(activity.seconds);
  message.set_seconds_since_progress(activity.seconds_since_progress);
  return message;
}

Activity FromProto(const v1::Activity& activity) {
  Activity from = {.directory = activity.directory(),
                   .done_bytes = activity.done_bytes(),
                   .total_bytes = activity.total_bytes(),
                   .seconds = activity.seconds(),
                   .seconds_since_progress = activity.seconds_since_progress()};
  // A newer service may have more kinds.
  const bool is_known = v1::ActivityKind_IsValid(activity.kind()) && activity.kind() != 0;
  from.kind = is_known ? static_cast<ActivityKind>(activity.kind() - 1) : ActivityKind::kOther;
  if (const auto name = ParseJobName(activity.job()); name.ok()) from.job = name->job;
  return from;
}

v1::Generation ToProto(const Generation& generation) {
  v1::Generation out;
  out.set_epoch(generation.epoch);
  out.set_count(generation.count);
  return out;
}

Generation FromProto(const v1::Generation& generation) {
  return {generation.count(), generation.epoch()};
}

v1::UpdateMode ToProto(UpdateMode mode) {
  return mode == UpdateMode::kSpeculate ? v1::SPECULATE : v1::WAIT;
}

absl::StatusOr<UpdateMode> FromProto(v1::UpdateMode mode) {
  switch (mode) {
    case v1::UPDATE_MODE_UNSPECIFIED:
    case v1::WAIT:
      return UpdateMode::kWait;
    case v1::SPECULATE:
      return UpdateMode::kSpeculate;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("update_mode ", static_cast<int>(mode), " is not WAIT or SPECULATE"));
  }
}

v1::Plane ToProto(Plane plane) {
  switch (plane) {
    case Plane::kMaster:
      return v1::MASTER;
    case Plane::kExpAvg:
      return v1::EXP_AVG;
    case Plane::kExpAvgSq:
      return v1::EXP_AVG_SQ;
    case Plane::kMaxExpAvgSq:
      return v1::MAX_EXP_AVG_SQ;
  }
  return v1::PLANE_UNSPECIFIED;
}

absl::StatusOr<Plane> FromProto(v1::Plane plane) {
  switch (plane) {
    case v1::MASTER:
      return Plane::kMaster;
    case v1::EXP_AVG:
      return Plane::kExpAvg;
    case v1::EXP_AVG_SQ:
      return Plane::kExpAvgSq;
    case v1::MAX_EXP_AVG_SQ:
      return Plane::kMaxExpAvgSq;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("plane is ", static_cast<int>(plane),
                       ", which is none of MASTER, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ"));
  }
}

v1::StateWrite ToProto(const StateWrite& write) {
  v1::StateWrite message;
  message.set_step(write.step);
  message.set_number(write.number);
  for (const Plane plane : write.planes) message.add_planes(ToProto(plane));
  message.mutable_parameters()->Add(write.parameters.begin(), write.parameters.end());
  message.mutable_update_counts()->Add(write.update_counts.begin(), write.update_counts.end());
  return message;
}

absl::StatusOr<StateWrite> FromProto(const v1::StateWrite& message) {
  StateWrite write = {
      .step = message.step(),
      .number = message.number(),
      .parameters = {message.parameters().begin(), message.parameters().end()},
      .update_counts = {message.update_counts().begin(), message.update_counts().end()}};
  for (const int plane : message.planes()) {
    BALLAST_ASSIGN_OR_RETURN(const Plane known, FromProto(static_cast<v1::Plane>(plane)));
    write.planes.push_back(known);
  }
  return write;
}

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return v1::BF16;
    case DType::kFloat16:
      return v1::FP16;
    case DType::kFloat32:
      return v1::FP32;
  }
  return v1::DTYPE_UNSPECIFIED;
}

v1::HyperParameters ToProto(const HyperParameters& values) {
  v1::HyperParameters out;
  out.set_lr(values.lr);
  out.set_beta1(values.beta1);
  out.set_beta2(values.beta2);
  out.set_eps(values.eps);
  out.set_weight_decay(values.weight_decay);
  out.set_decoupled_weight_decay(values.decoupled_weight_decay);
  out.set_bias_correction(values.bias_correction);
  out.set_amsgrad(values.amsgrad);
  out.set_maximize(values.maximize);
  return out;
}

v1::HyperParameters ToProto(const HyperParameterOverrides& values) {
  v1::HyperParameters out;
  if (values.lr) out.set_lr(*values.lr);
  if (values.beta1) out.set_beta1(*values.beta1);
  if (values.beta2) out.set_beta2(*values.beta2);
  if (values.eps) out.set_eps(*values.eps);
  if (values.weight_decay) out.set_weight_decay(*values.weight_decay);
  if (values.decoupled_weight_decay) {
    out.set_decoupled_weight_decay(*values.decoupled_weight_decay);
  }
  if (values.bias_correction) out.set_bias_correction(*values.bias_correction);
  if (values.maximize) out.set_maximize(*values.maximize);
  return out;
}

absl::StatusOr<HyperParameters> FullFromProto(const v1::HyperParameters& values) {
  // By reflection, so that a field that is added later is not forgotten here.
  const google::protobuf::Descriptor& fields = *v1::HyperParameters::descriptor();
  for (int i = 0; i < fields.field_count(); ++i) {
    if (!values.GetReflection()->HasField(values, fields.field(i))) {
      return absl::InvalidArgumentError(absl::StrCat("hyper_parameters.", fields.field(i)->name(),
                                                     " is not set; all are needed"));
    }
  }
  return HyperParameters{.lr = values.lr(),
                         .beta1 = values.beta1(),
                         .beta2 = values.beta2(),
                         .eps = values.eps(),
                         .weight_decay = values.weight_decay(),
                         .decoupled_weight_decay = values.decoupled_weight_decay(),
                         .bias_correction = values.bias_correction(),
                         .amsgrad = values.amsgrad(),
                         .maximize = values.maximize()};
}

absl::StatusOr<HyperParameterOverrides> OverridesFromProto(const v1::HyperParameters& values) {
  // amsgrad decides how many planes the state has, which is allocated with the job.
  if (values.has_amsgrad()) {
    return absl::InvalidArgumentError(
        "amsgrad is fixed when the job is created; leave it out of changes");
  }
  HyperParameterOverrides out;
  if (values.has_lr()) out.lr = values.lr();
  if (values.has_beta1()) out.beta1 = values.beta1();
  if (values.has_beta2()) out.beta2 = values.beta2();
  if (values.has_eps()) out.eps = values.eps();
  if (values.has_weight_decay()) out.weight_decay = values.weight_decay();
  if (values.has_decoupled_weight_decay()) {
    out.decoupled_weight_decay = values.decoupled_weight_decay();
  }
  if (values.has_bias_correction()) out.bias_correction = values.bias_correction();
  if (values.has_maximize()) out.maximize = values.maximize();
  return out;
}

v1::Job ToProto(const JobSpec& spec) {
  v1::Job job;
  job.set_name(JobName(spec.name));
  job.set_world_size(spec.layout.world_size);
  job.set_chunk_elements(spec.layout.chunk_elements);
  job.set_unused_policy(ToProto(spec.unused_policy));
  job.set_max_micro_steps(spec.max_micro_steps);
  job.set_update_mode(ToProto(spec.update_mode));
  job.set_on_abort(spec.on_abort == OnAbort::kSkip ? v1::SKIP_STEP : v1::REDO_STEP);
  job.set_keep_previous(spec.keep_previous);
  for (const GroupSpec& from : spec.groups) {
    v1::ParamGroup& to = *job.add_groups();
    to.set_name(GroupName(spec.name, from.name));
    *to.mutable_hyper_parameters() = ToProto(from.hyper_parameters);
    to.set_wire_dtype(ToProto(from.wire_dtype));
    to.set_return_dtype(ToProto(from.return_dtype));
  }
  AddLayout(spec, job);
  return job;
}

absl::StatusOr<JobSpec> FromProto(const v1::Job& job) {
  JobSpec spec;
  spec.name = WithoutPrefix(job.name(), kJobs);
  spec.max_micro_steps = job.max_micro_steps();
  BALLAST_ASSIGN_OR_RETURN(spec.update_mode, FromProto(job.update_mode()));
  BALLAST_ASSIGN_OR_RETURN(spec.on_abort, FromProto(job.on_abort()));
  BALLAST_ASSIGN_OR_RETURN(spec.unused_policy, FromProto(job.unused_policy()));
  spec.keep_previous = job.keep_previous();
  spec.layout.world_size = job.world_size();
  spec.layout.group_count = job.groups_size();
  // Zero is an absent field, and leaves the default. Whether the rest makes a job is not decided
  // here, but where one is created.
  if (job.chunk_elements() != 0) spec.layout.chunk_elements = job.chunk_elements();
  for (const v1::ParamGroup& group : job.groups()) {
    BALLAST_ASSIGN_OR_RETURN(GroupSpec from, GroupFromProto(group, spec.name));
    spec.groups.push_back(std::move(from));
  }
  // Made once, since a job may have a million parameters.
  const std::string prefix = ParameterName(spec.name, "");
  for (const v1::Parameter& parameter : job.parameters()) {
    spec.layout.parameters.push_back(ParameterFromProto(parameter, prefix));
  }
  for (const v1::MeshDim& dim : job.mesh()) {
    spec.layout.mesh.push_back({.name = dim.name(), .size = dim.size()});
  }
  for (const v1::PartitionRange& range : job.partitions()) {
    spec.layout.partitions.push_back(
        {.rank = range.rank(), .group = range.group(), .begin = range.begin(), .end = range.end()});
  }
  return spec;
}

std::string JobName(absl::string_view job) { return absl::StrCat(kJobs, job); }
std::string GroupName(absl::string_view job, absl::string_view group) {
  return absl::StrCat(kJobs, job, kGroups, group);
}
std::string ParameterName(absl::string_view job, absl::string_view parameter) {
  return absl::StrCat(kJobs, job, kParameters, parameter);
}

absl::StatusOr<ResourceName> ParseJobName(absl::string_view name) {
  return ParseChild(name, "", "jobs/JOB");
}
absl::StatusOr<ResourceName> ParseGroupName(absl::string_view name) {
  return ParseChild(name, kGroups, "jobs/JOB/groups/GROUP");
}
absl::StatusOr<ResourceName> ParseParameterName(absl::string_view name) {
  return ParseChild(name, kParameters, "jobs/JOB/parameters/PARAMETER");
}

}  // namespace ballast::proto
