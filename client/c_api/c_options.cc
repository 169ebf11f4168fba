#include "client/c_api/c_options.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/c_api/c_call.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client {
namespace {

absl::StatusOr<DType> ReadDType(int32_t dtype, const std::string& group) {
  switch (dtype) {
    case BALLAST_FLOAT32:
      return DType::kFloat32;
    case BALLAST_BFLOAT16:
      return DType::kBFloat16;
    case BALLAST_FLOAT16:
      return DType::kFloat16;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("group ", group, " has dtype ", dtype, "; expected a ballast_dtype"));
}

// The rule's fields of `given`, whose other fields may hold anything.
absl::StatusOr<HyperParameters> ReadHyperParameters(const ballast_hyper_parameters& given,
                                                    const std::string& group) {
  if (given.rule < 0 || given.rule >= static_cast<int>(Rules().size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", group, " has rule ", given.rule, "; expected a ballast_rule"));
  }
  HyperParameters values = DefaultsOf(static_cast<Rule>(given.rule));
  const auto read = [](const char*, auto& value, auto field) {
    value = static_cast<std::decay_t<decltype(value)>>(field);
  };
  ForEachOf(values.rule, read, values, given);
  return values;
}

absl::StatusOr<std::map<int, HyperParameterOverrides>> ReadOverrides(
    const ballast_hyper_parameters* given, absl::Span<const GroupSpec> groups) {
  std::map<int, HyperParameterOverrides> overrides;
  for (size_t g = 0; given != nullptr && g < groups.size(); ++g) {
    BALLAST_ASSIGN_OR_RETURN(const HyperParameters values,
                             ReadHyperParameters(given[g], groups[g].name));
    const Rule rule = groups[g].hyper_parameters.rule;
    if (values.rule != rule) {
      return absl::InvalidArgumentError(
          absl::StrCat("group ", groups[g].name, " has the rule ", RowOf(rule).name,
                       ", which is fixed; got values of ", RowOf(values.rule).name));
    }
    ForEachOf(
        rule, [](const char*, auto& value, auto given) { value = given; },
        overrides[static_cast<int>(g)], values);
  }
  return overrides;
}

Clipping ReadClipping(double max_norm, const double* multipliers, size_t group_count) {
  Clipping clipping = {.max_norm = max_norm, .multipliers = {}};
  if (multipliers != nullptr) clipping.multipliers.assign(multipliers, multipliers + group_count);
  return clipping;
}

// Nullopt: null.
absl::StatusOr<std::optional<std::string>> ReadTrainerState(const void* state, size_t bytes,
                                                            const char* structure) {
  if (bytes > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("trainer_state has ", bytes, " bytes, more than ", kMaxTrainerStateBytes));
  }
  if (bytes > 0 && state == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(structure, ".trainer_state is null"));
  }
  // None is not the same as an empty one: with none, a vote keeps the state of begin_step.
  if (state == nullptr) return std::nullopt;
  return std::string(static_cast<const char*>(state), bytes);
}

absl::StatusOr<GroupSpec> ReadGroup(const ballast_group& given) {
  BALLAST_RETURN_IF_ERROR(CheckGiven(given.name, "ballast_group.name"));
  GroupSpec group = {.name = given.name};
  BALLAST_ASSIGN_OR_RETURN(group.hyper_parameters,
                           ReadHyperParameters(given.hyper_parameters, group.name));
  BALLAST_ASSIGN_OR_RETURN(group.wire_dtype, ReadDType(given.wire_dtype, group.name));
  BALLAST_ASSIGN_OR_RETURN(group.return_dtype, ReadDType(given.return_dtype, group.name));
  return group;
}

absl::StatusOr<StateSpec> ReadState(const ballast_group& given) {
  if (given.state < BALLAST_STATE_FP32 || given.state > BALLAST_STATE_8BIT) {
    return absl::InvalidArgumentError(absl::StrCat("group ", given.name, ": state is ", given.state,
                                                   "; expected a ballast_state_format"));
  }
  return StateSpec{.format = static_cast<StateFormat>(given.state),
                   .fallback = given.state_fallback != 0};
}

absl::StatusOr<std::vector<MeshDim>> ReadMesh(const ballast_job& given) {
  std::vector<MeshDim> mesh;
  if (given.mesh_dimensions == 0) return mesh;
  BALLAST_RETURN_IF_ERROR(CheckStructure(given.mesh, "ballast_mesh_dim"));
  if (given.mesh_dimensions > kMaxDimensions) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the mesh has ", given.mesh_dimensions, " dimensions; expected at most ", kMaxDimensions));
  }
  for (size_t m = 0; m < given.mesh_dimensions; ++m) {
    const ballast_mesh_dim dim = CReadAt(given.mesh, m);
    BALLAST_RETURN_IF_ERROR(CheckGiven(dim.name, "ballast_mesh_dim.name"));
    mesh.push_back({.name = dim.name, .size = dim.ranks});
  }
  BALLAST_RETURN_IF_ERROR(CheckMesh(mesh, given.world_size));
  return mesh;
}

// Reads and checks the placements, after the shape: pointers are checked by what the rank owns of
// the parameter.
absl::Status ReadPlacements(const ballast_parameter& given, absl::Span<const MeshDim> mesh,
                            ParameterSpec& parameter) {
  if (given.placements == nullptr) {
    if (mesh.empty() || !parameter.trainable) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("parameter ", parameter.name,
                                                   " has no placements, one for each of the ",
                                                   mesh.size(), " dimensions of the mesh"));
  }
  if (mesh.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", parameter.name, " has placements, but the job describes no mesh"));
  }
  for (size_t m = 0; m < mesh.size(); ++m) {
    parameter.placements.push_back({.shard_dim = given.placements[m]});
  }
  return Annotate(CheckPlacements(parameter.placements, mesh, parameter.shape),
                  absl::StrCat("parameter ", parameter.name));
}

absl::StatusOr<ParameterSpec> ReadParameter(const ballast_parameter& given,
                                            absl::Span<const MeshDim> mesh) {
  BALLAST_RETURN_IF_ERROR(CheckGiven(given.name, "ballast_parameter.name"));
  constexpr int32_t kMaxDimensions = 64;
  if (given.dimensions < 0 || given.dimensions > kMaxDimensions ||
      (given.dimensions > 0 && given.shape == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("parameter ", given.name, " has ",
                                                   given.dimensions, " dimensions; expected 0 to ",
                                                   kMaxDimensions, " and their extents"));
  }
  ParameterSpec parameter = {.name = given.name,
                             .shape = {given.shape, given.shape + given.dimensions},
                             .group = given.group,
                             .trainable = given.frozen == 0};
  BALLAST_RETURN_IF_ERROR(ReadPlacements(given, mesh, parameter));
  return parameter;
}

absl::Status ReadMembers(const ballast_job& given, JobSpec& job) {
  if (given.member_count == 0) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckGiven(given.members, "ballast_job.members"));
  BALLAST_RETURN_IF_ERROR(CheckGiven(given.homes, "ballast_job.homes"));
  if (given.member_count > static_cast<size_t>(given.world_size)) {
    return absl::InvalidArgumentError(absl::StrCat("the job has ", given.member_count,
                                                   " members for ", given.world_size,
                                                   " ranks, and each needs a rank"));
  }
  for (size_t m = 0; m < given.member_count; ++m) {
    BALLAST_RETURN_IF_ERROR(CheckGiven(given.members[m], "an address of ballast_job.members"));
    job.members.push_back({.address = given.members[m]});
  }
  job.homes.assign(given.homes, given.homes + given.world_size);
  return absl::OkStatus();
}

absl::StatusOr<JobSpec> ReadJob(const ballast_job& given) {
  BALLAST_RETURN_IF_ERROR(CheckGiven(given.name, "ballast_job.name"));
  if (given.group_count > 0) {
    BALLAST_RETURN_IF_ERROR(CheckStructure(given.groups, "ballast_group"));
  }
  if (given.parameter_count > 0) {
    BALLAST_RETURN_IF_ERROR(CheckStructure(given.parameters, "ballast_parameter"));
  }
  // Before the loops below read so many structures of the caller's memory.
  if (given.group_count > static_cast<size_t>(kMaxGroups) ||
      given.parameter_count > static_cast<size_t>(kMaxParameters)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the job has ", given.group_count, " groups and ", given.parameter_count,
                     " parameters; at most ", kMaxGroups, " and ", kMaxParameters, " are allowed"));
  }
  // CutInBuckets cuts by it before Session::Open can check it.
  if (given.world_size < 1 || given.world_size > kMaxWorldSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("world_size is ", given.world_size, "; expected 1 to ", kMaxWorldSize));
  }
  JobSpec job = {.name = given.name, .max_micro_steps = given.max_micro_steps};
  for (size_t g = 0; g < given.group_count; ++g) {
    const ballast_group group = CReadAt(given.groups, g);
    BALLAST_ASSIGN_OR_RETURN(job.groups.emplace_back(), ReadGroup(group));
    BALLAST_ASSIGN_OR_RETURN(job.layout.states.emplace_back(), ReadState(group));
  }
  const bool any = std::ranges::any_of(job.layout.states,
                                       [](const StateSpec& state) { return state != StateSpec(); });
  if (!any) job.layout.states.clear();
  job.layout.world_size = given.world_size;
  job.layout.group_count = static_cast<int>(given.group_count);
  BALLAST_ASSIGN_OR_RETURN(job.layout.mesh, ReadMesh(given));
  job.layout.parameters.reserve(given.parameter_count);
  for (size_t p = 0; p < given.parameter_count; ++p) {
    BALLAST_ASSIGN_OR_RETURN(job.layout.parameters.emplace_back(),
                             ReadParameter(CReadAt(given.parameters, p), job.layout.mesh));
  }
  // Session::Open checks a layout, but only one that is whole, so what partitions, and what this
  // rank owns, are computed from is checked here.
  BALLAST_RETURN_IF_ERROR(CheckParameters(job.layout));
  if (given.chunk_elements > 0) job.layout.chunk_elements = given.chunk_elements;
  if (job.layout.mesh.empty()) {
    BALLAST_RETURN_IF_ERROR(CutInBuckets(
        given.bucket_elements > 0 ? given.bucket_elements : kMaxFlatElements, job.layout));
  } else if (given.bucket_elements != 0) {
    return absl::InvalidArgumentError(
        "the job has bucket_elements and a mesh; parameters are sharded one way or the other");
  }
  switch (given.unused_policy) {
    case BALLAST_UNUSED_ERROR:
      job.unused_policy = UnusedPolicy::kError;
      break;
    case BALLAST_UNUSED_SKIP:
      job.unused_policy = UnusedPolicy::kSkip;
      break;
    case BALLAST_UNUSED_ZERO:
      job.unused_policy = UnusedPolicy::kZero;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("unused_policy is ", given.unused_policy, "; expected 0, 1 or 2"));
  }
  if (given.update_mode != BALLAST_UPDATE_WAIT && given.update_mode != BALLAST_UPDATE_SPECULATE) {
    return absl::InvalidArgumentError(
        absl::StrCat("update_mode is ", given.update_mode, "; expected 0 or 1"));
  }
  job.update_mode =
      given.update_mode == BALLAST_UPDATE_SPECULATE ? UpdateMode::kSpeculate : UpdateMode::kWait;
  if (given.on_abort != BALLAST_ON_ABORT_REDO && given.on_abort != BALLAST_ON_ABORT_SKIP) {
    return absl::InvalidArgumentError(
        absl::StrCat("on_abort is ", given.on_abort, "; expected 0 or 1"));
  }
  job.on_abort = given.on_abort == BALLAST_ON_ABORT_SKIP ? OnAbort::kSkip : OnAbort::kRedo;
  if (given.keep_previous != 0 && given.keep_previous != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("keep_previous is ", given.keep_previous, "; expected 0 or 1"));
  }
  job.keep_previous = given.keep_previous == 1;
  if (given.newton_schulz != BALLAST_BY_SERVICE && given.newton_schulz != BALLAST_BY_WORKERS) {
    return absl::InvalidArgumentError(
        absl::StrCat("newton_schulz is ", given.newton_schulz, "; expected 0 or 1"));
  }
  job.newton_schulz = given.newton_schulz == BALLAST_BY_WORKERS ? Orthogonalizer::kWorkers
                                                                : Orthogonalizer::kService;
  BALLAST_RETURN_IF_ERROR(ReadMembers(given, job));
  return job;
}

}  // namespace

absl::Status ReadSeconds(double seconds, const char* name, absl::Duration& out) {
  if (seconds == 0) return absl::OkStatus();
  // Written so that NaN is refused.
  if (!(seconds > 0) || std::isinf(seconds)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", seconds, "; expected a positive number of seconds"));
  }
  out = absl::Seconds(seconds);
  return absl::OkStatus();
}

absl::StatusOr<SessionOptions> ReadOptions(const ballast_options& given) {
  BALLAST_RETURN_IF_ERROR(CheckStructure(given.job, "ballast_job"));
  SessionOptions options;
  BALLAST_ASSIGN_OR_RETURN(options.job, ReadJob(CRead(given.job)));
  options.rank = given.rank;
  if (given.process_id != nullptr) options.process_id = given.process_id;
  if (given.job_uid != nullptr) options.job_uid = given.job_uid;
  if (given.derive_from_uid != nullptr) options.derive_from_uid = given.derive_from_uid;
  if (given.derive_from_checkpoint != nullptr) {
    options.derive_from_checkpoint = given.derive_from_checkpoint;
  }
  options.rejoin = given.rejoin != 0;
  if (given.never_share_memory != 0) options.shared_memory = SharedMemoryUse::kNever;
  BALLAST_RETURN_IF_ERROR(
      ReadSeconds(given.join_timeout_seconds, "join_timeout_seconds", options.join_timeout));
  BALLAST_RETURN_IF_ERROR(ReadSeconds(given.reconnect_timeout_seconds, "reconnect_timeout_seconds",
                                      options.reconnect_timeout));
  BALLAST_RETURN_IF_ERROR(ReadSeconds(given.wait_seconds, "wait_seconds", options.seal_timeout));
  return options;
}

Credentials ReadCredentials(const ballast_options& given) {
  const auto text = [](const char* path) { return std::string(path == nullptr ? "" : path); };
  return OrEnvironment({.tls_ca = text(given.tls_ca),
                        .tls_cert = text(given.tls_cert),
                        .tls_key = text(given.tls_key),
                        .token_file = text(given.token_file)});
}

std::vector<bool> OwnedBy(const SessionOptions& options) {
  const LayoutSpec& layout = options.job.layout;
  std::vector<bool> owned;
  for (const ParameterSpec& spec : layout.parameters) {
    owned.push_back(spec.trainable && std::ranges::count(spec.shape, 0) == 0);
  }
  if (layout.mesh.empty()) return owned;
  // What is wrong with the description, Session::Open says.
  const absl::StatusOr<Layout> here = Layout::CreateForRanks(layout, {options.rank});
  if (!here.ok()) return owned;
  for (size_t p = 0; p < owned.size(); ++p) {
    if (owned[p]) owned[p] = !here->ChunksOfParameter(static_cast<int>(p)).empty();
  }
  return owned;
}

absl::StatusOr<StepSettings> ReadStep(const ballast_step& given,
                                      absl::Span<const GroupSpec> groups) {
  StepSettings settings;
  if (given.loss_scale != 0) settings.scale.loss_scale = given.loss_scale;
  if (given.divisors != nullptr) {
    settings.scale.divisors.assign(given.divisors, given.divisors + groups.size());
  }
  BALLAST_ASSIGN_OR_RETURN(settings.overrides, ReadOverrides(given.hyper_parameters, groups));
  settings.expected_clipping =
      ReadClipping(given.expected_max_norm, given.expected_multipliers, groups.size());
  BALLAST_ASSIGN_OR_RETURN(
      std::optional<std::string> state,
      ReadTrainerState(given.trainer_state, given.trainer_state_bytes, "ballast_step"));
  settings.trainer_state = std::move(state).value_or("");
  return settings;
}

absl::StatusOr<StepVote> ReadBallot(const ballast_ballot* ballot,
                                    absl::Span<const GroupSpec> groups) {
  if (ballot == nullptr) return StepVote();
  BALLAST_RETURN_IF_ERROR(CheckStructure(ballot, "ballast_ballot"));
  const ballast_ballot given = CRead(ballot);
  StepVote vote = {.apply = given.abandon == 0,
                   .clipping = ReadClipping(given.max_norm, given.multipliers, groups.size())};
  BALLAST_ASSIGN_OR_RETURN(vote.overrides, ReadOverrides(given.hyper_parameters, groups));
  BALLAST_ASSIGN_OR_RETURN(
      vote.trainer_state,
      ReadTrainerState(given.trainer_state, given.trainer_state_bytes, "ballast_ballot"));
  return vote;
}

ballast_hyper_parameters WriteHyperParameters(const HyperParameters& values) {
  ballast_hyper_parameters written = {};
  written.rule = static_cast<int32_t>(values.rule);
  const auto write = [](const char*, auto& value, auto field) { value = field; };
  ForEachOf(values.rule, write, written, values);
  return written;
}

absl::StatusOr<Last> ReadLast(int32_t last) {
  switch (last) {
    case BALLAST_MORE:
      return Last::kMore;
    case BALLAST_FINAL:
      return Last::kFinal;
    case BALLAST_MAY_GUESS:
      return Last::kMayGuess;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("final is ", last, "; expected 0, 1 or 2 (ballast_last)"));
}

}  // namespace ballast::client
