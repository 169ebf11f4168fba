#include "proto/convert.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/generated_enum_reflection.h>

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rule.h"
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

static_assert(v1::FP32 == static_cast<int>(DType::kFloat32) + 1);
static_assert(v1::STATE_8BIT == static_cast<int>(StateFormat::k8Bit) + 1);
static_assert(v1::ZERO == static_cast<int>(UnusedPolicy::kZero) + 1);
static_assert(v1::SKIP_STEP == static_cast<int>(OnAbort::kSkip) + 1);
static_assert(v1::BY_WORKERS == static_cast<int>(Orthogonalizer::kWorkers) + 1);
static_assert(v1::SPECULATE == static_cast<int>(UpdateMode::kSpeculate) + 1);
static_assert(v1::SUM == static_cast<int>(Plane::kSum) + 1);
static_assert(v1::SIGN_SGD == static_cast<int>(Rule::kSignSgd) + 1);
static_assert(v1::MUON == static_cast<int>(Rule::kMuon) + 1);
static_assert(v1::LOADING_CHECKPOINT == static_cast<int>(ActivityKind::kLoadingCheckpoint) + 1);

// By number; nullopt: it has no name here, such as one of a later client, or is 0.
template <typename Value, typename Message>
std::optional<Value> Known(Message message) {
  const int number = static_cast<int>(message);
  if (number == 0 ||
      google::protobuf::GetEnumDescriptor<Message>()->FindValueByNumber(number) == nullptr) {
    return std::nullopt;
  }
  return static_cast<Value>(number - 1);
}

template <typename Value, typename Message>
absl::StatusOr<Value> EnumFromProto(Message message, absl::string_view what) {
  if (const auto known = Known<Value>(message); known.has_value()) return *known;
  const google::protobuf::EnumDescriptor& type = *google::protobuf::GetEnumDescriptor<Message>();
  std::string names;
  for (int i = 1; i < type.value_count(); ++i) {
    absl::StrAppend(&names, i == 1 ? "" : ", ", type.value(i)->name());
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", static_cast<int>(message), "; expected one of ", names));
}

// An absent field means the first one.
template <typename Value, typename Message>
absl::StatusOr<Value> EnumOrFirst(Message message, absl::string_view what) {
  return message == 0 ? Value() : EnumFromProto<Value>(message, what);
}

absl::StatusOr<GroupSpec> GroupFromProto(const v1::ParamGroup& group, const std::string& prefix) {
  GroupSpec spec;
  // The full name of another job's group keeps its slashes, and is refused for them later
  // (job_spec.cc).
  spec.name = WithoutPrefix(group.name(), prefix);
  const std::string what = absl::StrCat("group '", spec.name.substr(0, kMaxGroupNameBytes), "'");
  absl::StatusOr<HyperParameters> values = FullFromProto(group.hyper_parameters());
  if (!values.ok()) return Annotate(values.status(), what);
  spec.hyper_parameters = *values;
  BALLAST_ASSIGN_OR_RETURN(
      spec.wire_dtype, EnumOrFirst<DType>(group.wire_dtype(), absl::StrCat(what, ": wire_dtype")));
  BALLAST_ASSIGN_OR_RETURN(
      spec.return_dtype,
      EnumOrFirst<DType>(group.return_dtype(), absl::StrCat(what, ": return_dtype")));
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
  message.set_kind(EnumToProto<v1::ActivityKind>(activity.kind));
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
  from.kind = Known<ActivityKind>(activity.kind()).value_or(ActivityKind::kOther);
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

absl::StatusOr<UpdateMode> FromProto(v1::UpdateMode mode) {
  return EnumOrFirst<UpdateMode>(mode, "update_mode");
}

absl::StatusOr<Rule> FromProto(v1::Rule rule) {
  return EnumOrFirst<Rule>(rule, "hyper_parameters.rule");
}

absl::StatusOr<Plane> FromProto(v1::Plane plane) { return EnumFromProto<Plane>(plane, "plane"); }

v1::PlaneSummary ToProto(const PlaneSummary& summary, Plane plane, bool with_sums) {
  v1::PlaneSummary message;
  message.set_plane(ToProto(plane));
  message.set_norm(summary.norm());
  message.set_mean(summary.mean());
  message.set_min(summary.min);
  message.set_max(summary.max);
  message.set_zeros(summary.zeros);
  message.set_non_finite(summary.non_finite);
  message.mutable_magnitude_histogram()->Add(summary.magnitude_histogram.begin(),
                                             summary.magnitude_histogram.end());
  if (!with_sums) return message;
  const auto add = [](const ExactSum& sum, google::protobuf::RepeatedField<uint64_t>& words) {
    words.Add(sum.words().begin(), sum.words().end());
  };
  add(summary.squares, *message.mutable_sums()->mutable_squares());
  add(summary.positive, *message.mutable_sums()->mutable_positive());
  add(summary.negative, *message.mutable_sums()->mutable_negative());
  return message;
}

absl::StatusOr<PlaneSummary> FromProto(const v1::PlaneSummary& message) {
  PlaneSummary summary = {.min = message.min(),
                          .max = message.max(),
                          .zeros = message.zeros(),
                          .non_finite = message.non_finite()};
  const v1::PlaneSums& sums = message.sums();
  ExactSum::Words words;
  for (const auto& [from, to] : {std::pair(&sums.squares(), &summary.squares),
                                 std::pair(&sums.positive(), &summary.positive),
                                 std::pair(&sums.negative(), &summary.negative)}) {
    if (from->size() != static_cast<int>(words.size())) {
      return absl::InternalError("a summary has no sums; use the same versions");
    }
    std::copy(from->begin(), from->end(), words.begin());
    *to = ExactSum::FromWords(words);
  }
  if (message.magnitude_histogram_size() != static_cast<int>(summary.magnitude_histogram.size())) {
    return absl::InternalError("a summary has another histogram; use the same versions");
  }
  std::copy(message.magnitude_histogram().begin(), message.magnitude_histogram().end(),
            summary.magnitude_histogram.begin());
  return summary;
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

namespace {

const google::protobuf::FieldDescriptor* FieldOf(const v1::HyperParameters& values,
                                                 const char* name) {
  return values.GetDescriptor()->FindFieldByName(name);
}

void Set(v1::HyperParameters& out, const char* name, double value) {
  out.GetReflection()->SetDouble(&out, FieldOf(out, name), value);
}
void Set(v1::HyperParameters& out, const char* name, int32_t value) {
  out.GetReflection()->SetInt32(&out, FieldOf(out, name), value);
}
void Set(v1::HyperParameters& out, const char* name, bool value) {
  out.GetReflection()->SetBool(&out, FieldOf(out, name), value);
}
template <typename T>
void Set(v1::HyperParameters& out, const char* name, const std::optional<T>& value) {
  if (value) Set(out, name, *value);
}

void Get(const v1::HyperParameters& from, const char* name, double& value) {
  value = from.GetReflection()->GetDouble(from, FieldOf(from, name));
}
void Get(const v1::HyperParameters& from, const char* name, int32_t& value) {
  value = from.GetReflection()->GetInt32(from, FieldOf(from, name));
}
void Get(const v1::HyperParameters& from, const char* name, bool& value) {
  value = from.GetReflection()->GetBool(from, FieldOf(from, name));
}
template <typename T>
void Get(const v1::HyperParameters& from, const char* name, std::optional<T>& value) {
  if (from.GetReflection()->HasField(from, FieldOf(from, name))) Get(from, name, value.emplace());
}

}  // namespace

v1::HyperParameters ToProto(const HyperParameters& values) {
  v1::HyperParameters out;
  out.set_rule(EnumToProto<v1::Rule>(values.rule));
  ForEachOf(
      values.rule, [&](const char* name, const auto& value) { Set(out, name, value); }, values);
  return out;
}

v1::HyperParameters ToProto(const HyperParameterOverrides& values) {
  v1::HyperParameters out;
  ForEachHyperParameter([&](const char* name, const auto& value) { Set(out, name, value); },
                        values);
  return out;
}

absl::StatusOr<HyperParameters> FullFromProto(const v1::HyperParameters& values) {
  BALLAST_ASSIGN_OR_RETURN(const Rule rule, FromProto(values.rule()));
  const RuleRow& row = RowOf(rule);
  HyperParameters result = row.defaults;
  absl::Status status;
  ForEachHyperParameter(
      [&](const char* name, auto& value) {
        const bool is_set = values.GetReflection()->HasField(values, FieldOf(values, name));
        if (status.ok() && is_set && !row.has(name)) {
          status = absl::InvalidArgumentError(absl::StrCat("hyper_parameters.", name,
                                                           " is set, but rule ", row.name,
                                                           " does not have it; leave it out"));
        }
        if (status.ok() && !is_set && row.has(name)) {
          status = absl::InvalidArgumentError(absl::StrCat(
              "hyper_parameters.", name, " is not set; set every field of rule ", row.name));
        }
        if (is_set) Get(values, name, value);
      },
      result);
  BALLAST_RETURN_IF_ERROR(status);
  return result;
}

absl::StatusOr<HyperParameterOverrides> OverridesFromProto(const v1::HyperParameters& values) {
  const auto fixed = [](absl::string_view name) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is fixed when the job is created; leave it out of changes"));
  };
  if (values.rule() != v1::RULE_UNSPECIFIED) return fixed("rule");
  if (values.has_amsgrad()) return fixed("amsgrad");
  if (values.has_initial_accumulator_value()) return fixed("initial_accumulator_value");
  HyperParameterOverrides changes;
  ForEachHyperParameter([&](const char* name, auto& value) { Get(values, name, value); }, changes);
  return changes;
}

v1::Job ToProto(const JobSpec& spec, bool with_parameters) {
  v1::Job job;
  job.set_name(JobName(spec.name));
  job.set_world_size(spec.layout.world_size);
  job.set_chunk_elements(spec.layout.chunk_elements);
  job.set_unused_policy(EnumToProto<v1::UnusedPolicy>(spec.unused_policy));
  job.set_max_micro_steps(spec.max_micro_steps);
  job.set_update_mode(ToProto(spec.update_mode));
  job.set_on_abort(EnumToProto<v1::OnAbort>(spec.on_abort));
  job.set_newton_schulz(EnumToProto<v1::NewtonSchulz>(spec.newton_schulz));
  job.set_keep_previous(spec.keep_previous);
  for (const MemberSpec& member : spec.members) job.add_members()->set_address(member.address);
  job.mutable_homes()->Add(spec.homes.begin(), spec.homes.end());
  for (const GroupSpec& from : spec.groups) {
    v1::ParamGroup& to = *job.add_groups();
    to.set_name(GroupName(spec.name, from.name));
    *to.mutable_hyper_parameters() = ToProto(from.hyper_parameters);
    to.set_wire_dtype(ToProto(from.wire_dtype));
    to.set_return_dtype(ToProto(from.return_dtype));
    const StateSpec state = spec.layout.state(job.groups_size() - 1);
    to.set_state(ToProto(state.format));
    to.set_state_fallback(state.fallback);
  }
  if (with_parameters) AddLayout(spec, job);
  return job;
}

absl::StatusOr<JobSpec> FromProto(const v1::Job& job) {
  JobSpec spec;
  spec.name = WithoutPrefix(job.name(), kJobs);
  spec.max_micro_steps = job.max_micro_steps();
  BALLAST_ASSIGN_OR_RETURN(spec.update_mode, FromProto(job.update_mode()));
  BALLAST_ASSIGN_OR_RETURN(spec.on_abort, EnumOrFirst<OnAbort>(job.on_abort(), "on_abort"));
  BALLAST_ASSIGN_OR_RETURN(spec.newton_schulz,
                           EnumOrFirst<Orthogonalizer>(job.newton_schulz(), "newton_schulz"));
  BALLAST_ASSIGN_OR_RETURN(spec.unused_policy,
                           EnumOrFirst<UnusedPolicy>(job.unused_policy(), "unused_policy"));
  spec.keep_previous = job.keep_previous();
  for (const v1::JobMember& member : job.members()) {
    spec.members.push_back({.address = member.address()});
  }
  spec.homes.assign(job.homes().begin(), job.homes().end());
  spec.layout.world_size = job.world_size();
  spec.layout.group_count = job.groups_size();
  // Zero is an absent field, and leaves the default. Whether the rest makes a job is not decided
  // here, but where one is created.
  if (job.chunk_elements() != 0) spec.layout.chunk_elements = job.chunk_elements();
  const std::string group_prefix = GroupName(spec.name, "");
  for (const v1::ParamGroup& group : job.groups()) {
    BALLAST_ASSIGN_OR_RETURN(GroupSpec from, GroupFromProto(group, group_prefix));
    spec.groups.push_back(std::move(from));
    BALLAST_ASSIGN_OR_RETURN(
        const StateFormat format,
        EnumOrFirst<StateFormat>(
            group.state(),
            absl::StrCat("group '", group.name().substr(0, kMaxGroupNameBytes), "': state")));
    spec.layout.states.push_back({.format = format, .fallback = group.state_fallback()});
  }
  if (std::ranges::count(spec.layout.states, StateSpec()) == job.groups_size()) {
    spec.layout.states.clear();
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

std::string JobOf(const std::string& name) {
  return absl::StartsWith(name, kJobs)
             ? name.substr(kJobs.size(), name.find('/', kJobs.size()) - kJobs.size())
             : name;
}
std::string BareName(const std::string& name) {
  for (const auto parse : {ParseParameterName, ParseGroupName, ParseJobName}) {
    if (const auto parsed = parse(name); parsed.ok()) {
      return parsed->child.empty() ? parsed->job : parsed->child;
    }
  }
  return name;
}

}  // namespace ballast::proto
