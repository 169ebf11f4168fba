#include "client/c_api/c_options.h"

#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/c_api/c_call.h"
#include "cpu_optimizer_service/common/buckets.h"
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
      absl::StrCat("group ", group, " has dtype ", dtype, ", which is no ballast_dtype"));
}

HyperParameters ReadHyperParameters(const ballast_hyper_parameters& given) {
  return {.lr = given.lr,
          .beta1 = given.beta1,
          .beta2 = given.beta2,
          .eps = given.eps,
          .weight_decay = given.weight_decay,
          .decoupled_weight_decay = given.decoupled_weight_decay != 0,
          .bias_correction = given.bias_correction != 0,
          .amsgrad = given.amsgrad != 0,
          .maximize = given.maximize != 0};
}

absl::StatusOr<GroupSpec> ReadGroup(const ballast_group& given) {
  BALLAST_RETURN_IF_ERROR(CheckGiven(given.name, "ballast_group.name"));
  GroupSpec group = {.name = given.name,
                     .hyper_parameters = ReadHyperParameters(given.hyper_parameters)};
  BALLAST_ASSIGN_OR_RETURN(group.wire_dtype, ReadDType(given.wire_dtype, group.name));
  BALLAST_ASSIGN_OR_RETURN(group.return_dtype, ReadDType(given.return_dtype, group.name));
  return group;
}

absl::StatusOr<ParameterSpec> ReadParameter(const ballast_parameter& given) {
  BALLAST_RETURN_IF_ERROR(CheckGiven(given.name, "ballast_parameter.name"));
  constexpr int32_t kMaxDimensions = 64;
  if (given.dimensions < 0 || given.dimensions > kMaxDimensions ||
      (given.dimensions > 0 && given.shape == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("parameter ", given.name, " has ",
                                                   given.dimensions, " dimensions; expected 0 to ",
                                                   kMaxDimensions, " and their extents"));
  }
  return ParameterSpec{.name = given.name,
                       .shape = {given.shape, given.shape + given.dimensions},
                       .group = given.group,
                       .trainable = given.frozen == 0};
}

// Each group's flat space in buckets, each bucket cut among the ranks. Session::Open checks a layout, but
// only one that has partitions, so what they are computed from is checked here.
absl::Status AddPartitions(int64_t bucket_elements, LayoutSpec& layout) {
  int64_t all = 0;
  for (const ParameterSpec& parameter : layout.parameters) {
    if (parameter.group < 0 || parameter.group >= layout.group_count) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", parameter.name, " is in group ",
                                                     parameter.group, " of ", layout.group_count));
    }
    int64_t elements = 1;
    for (const int64_t extent : parameter.shape) {
      if (extent < 0 || (extent > 0 && elements > kMaxFlatElements / extent)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "parameter ", parameter.name, " has an extent of ", extent,
            ", which is negative, or makes more than ", kMaxFlatElements, " elements"));
      }
      elements *= extent;
    }
    all += elements;
    if (all > kMaxFlatElements) {
      return absl::InvalidArgumentError(
          absl::StrCat("the job has more than ", kMaxFlatElements, " elements"));
    }
  }
  const int64_t most = bucket_elements > 0 ? bucket_elements : kMaxFlatElements;
  layout.partitions = PartitionsOf(
      MakeBuckets(FlatElements(layout.parameters, layout.group_count), layout.world_size, most),
      layout.world_size);
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
  if (given.group_count > static_cast<size_t>(kMaxGroups) ||
      given.parameter_count > static_cast<size_t>(kMaxParameters)) {
    return absl::InvalidArgumentError(absl::StrCat(given.group_count, " groups and ",
                                                   given.parameter_count, " parameters; at most ",
                                                   kMaxGroups, " and ", kMaxParameters));
  }
  if (given.world_size < 1 || given.world_size > kMaxWorldSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("world_size is ", given.world_size, "; expected 1 to ", kMaxWorldSize));
  }
  JobSpec job = {
      .name = given.name, .max_norm = given.max_norm, .max_micro_steps = given.max_micro_steps};
  for (size_t g = 0; g < given.group_count; ++g) {
    BALLAST_ASSIGN_OR_RETURN(job.groups.emplace_back(), ReadGroup(CReadAt(given.groups, g)));
  }
  job.layout.world_size = given.world_size;
  job.layout.group_count = static_cast<int>(given.group_count);
  job.layout.parameters.reserve(given.parameter_count);
  for (size_t p = 0; p < given.parameter_count; ++p) {
    BALLAST_ASSIGN_OR_RETURN(job.layout.parameters.emplace_back(),
                             ReadParameter(CReadAt(given.parameters, p)));
  }
  if (given.chunk_elements > 0) job.layout.chunk_elements = given.chunk_elements;
  BALLAST_RETURN_IF_ERROR(AddPartitions(given.bucket_elements, job.layout));
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
  return job;
}

// 0 stands for the default.
absl::Status ReadSeconds(double seconds, const char* name, absl::Duration& out) {
  if (seconds == 0) return absl::OkStatus();
  if (!(seconds > 0) || std::isinf(seconds)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", seconds, "; expected a positive number of seconds"));
  }
  out = absl::Seconds(seconds);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SessionOptions> ReadOptions(const ballast_options& given) {
  BALLAST_RETURN_IF_ERROR(CheckStructure(given.job, "ballast_job"));
  SessionOptions options;
  BALLAST_ASSIGN_OR_RETURN(options.job, ReadJob(CRead(given.job)));
  options.rank = given.rank;
  if (given.process_id != nullptr) options.process_id = given.process_id;
  if (given.job_uid != nullptr) options.job_uid = given.job_uid;
  options.rejoin = given.rejoin != 0;
  if (given.never_share_memory != 0) options.shared_memory = SharedMemoryUse::kNever;
  BALLAST_RETURN_IF_ERROR(
      ReadSeconds(given.join_timeout_seconds, "join_timeout_seconds", options.join_timeout));
  BALLAST_RETURN_IF_ERROR(ReadSeconds(given.reconnect_timeout_seconds, "reconnect_timeout_seconds",
                                      options.reconnect_timeout));
  BALLAST_RETURN_IF_ERROR(ReadSeconds(given.wait_seconds, "wait_seconds", options.seal_timeout));
  return options;
}

absl::StatusOr<StepSettings> ReadStep(const ballast_step& given, int group_count) {
  StepSettings settings;
  if (given.loss_scale != 0) settings.scale.loss_scale = given.loss_scale;
  if (given.divisors != nullptr) {
    settings.scale.divisors.assign(given.divisors, given.divisors + group_count);
  }
  for (int g = 0; given.hyper_parameters != nullptr && g < group_count; ++g) {
    const HyperParameters values = ReadHyperParameters(given.hyper_parameters[g]);
    settings.overrides[g] = {.lr = values.lr,
                             .beta1 = values.beta1,
                             .beta2 = values.beta2,
                             .eps = values.eps,
                             .weight_decay = values.weight_decay,
                             .decoupled_weight_decay = values.decoupled_weight_decay,
                             .bias_correction = values.bias_correction,
                             .maximize = values.maximize};
  }
  if (given.trainer_state_bytes > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat("trainer_state has ", given.trainer_state_bytes,
                                                   " bytes, of ", kMaxTrainerStateBytes,
                                                   " at most"));
  }
  if (given.trainer_state_bytes > 0) {
    BALLAST_RETURN_IF_ERROR(CheckGiven(given.trainer_state, "ballast_step.trainer_state"));
    settings.trainer_state.assign(static_cast<const char*>(given.trainer_state),
                                  given.trainer_state_bytes);
  }
  return settings;
}

}  // namespace ballast::client
