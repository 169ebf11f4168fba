// Converts plain types to and from their messages, for both ends of the wire.
#ifndef BALLAST_PROTO_CONVERT_H_
#define BALLAST_PROTO_CONVERT_H_

#include <string>

#include "absl/status/statusor.h"
#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/history/rank_report.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/common/text/activity.h"

namespace ballast::proto {

// The input fields of a job, parameters and partitions included. Names become resource names.
v1::Job ToProto(const JobSpec& spec);
// INVALID_ARGUMENT for unset or unknown values that have no default. Sizes and names are checked
// when the job is created. Accepts resource names and bare names.
absl::StatusOr<JobSpec> FromProto(const v1::Job& job);

v1::HyperParameters ToProto(const HyperParameters& values);
v1::HyperParameters ToProto(const HyperParameterOverrides& values);
// INVALID_ARGUMENT names a field that is absent.
absl::StatusOr<HyperParameters> FullFromProto(const v1::HyperParameters& values);
// INVALID_ARGUMENT if amsgrad is set, which cannot change.
absl::StatusOr<HyperParameterOverrides> OverridesFromProto(const v1::HyperParameters& values);

v1::Clipping ToProto(const Clipping& clipping);
Clipping FromProto(const v1::Clipping& clipping);

v1::RankReport ToProto(const RankReport& report);
RankReport FromProto(const v1::RankReport& report);

v1::Activity ToProto(const Activity& activity);
Activity FromProto(const v1::Activity& activity);

v1::Generation ToProto(const Generation& generation);
Generation FromProto(const v1::Generation& generation);

v1::Plane ToProto(Plane plane);
// INVALID_ARGUMENT for an unknown plane, here and below.
absl::StatusOr<Plane> FromProto(v1::Plane plane);
v1::StateWrite ToProto(const StateWrite& write);
absl::StatusOr<StateWrite> FromProto(const v1::StateWrite& write);

v1::DType ToProto(DType dtype);
v1::UpdateMode ToProto(UpdateMode mode);
// INVALID_ARGUMENT for an unknown mode.
absl::StatusOr<UpdateMode> FromProto(v1::UpdateMode mode);

// Resource names: "jobs/J", "jobs/J/groups/G", "jobs/J/parameters/P" (P may have slashes).
std::string JobName(absl::string_view job);
std::string GroupName(absl::string_view job, absl::string_view group);
std::string ParameterName(absl::string_view job, absl::string_view parameter);
struct ResourceName {
  std::string job;
  std::string child;  // Group or parameter; empty for a job.
};
// INVALID_ARGUMENT if `name` does not have that form.
absl::StatusOr<ResourceName> ParseJobName(absl::string_view name);
absl::StatusOr<ResourceName> ParseGroupName(absl::string_view name);
absl::StatusOr<ResourceName> ParseParameterName(absl::string_view name);

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_CONVERT_H_
