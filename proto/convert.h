// Converts plain types to and from their messages, for client and service.
#ifndef BALLAST_PROTO_CONVERT_H_
#define BALLAST_PROTO_CONVERT_H_

#include <string>

#include "absl/status/statusor.h"
#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/state.pb.h"
#include "ballast/v1/train.pb.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/history/rank_report.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/norm/plane_summary.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/common/text/activity.h"

namespace ballast::proto {

// The input fields of a job. Names become resource names. Parameters, mesh and partitions may be
// many; they are optional.
v1::Job ToProto(const JobSpec& spec, bool with_parameters = true);
// INVALID_ARGUMENT for unset or unknown values without a default. Sizes and names are checked when
// the job is created. Accepts resource names and bare names.
absl::StatusOr<JobSpec> FromProto(const v1::Job& job);

v1::HyperParameters ToProto(const HyperParameters& values);
v1::HyperParameters ToProto(const HyperParameterOverrides& values);
absl::StatusOr<Rule> FromProto(v1::Rule rule);
// INVALID_ARGUMENT names a field of the rule that is absent, or one that the rule does not have.
absl::StatusOr<HyperParameters> FullFromProto(const v1::HyperParameters& values);
// INVALID_ARGUMENT if a field is set that cannot change.
absl::StatusOr<HyperParameterOverrides> OverridesFromProto(const v1::HyperParameters& values);

v1::Clipping ToProto(const Clipping& clipping);
Clipping FromProto(const v1::Clipping& clipping);

v1::RankReport ToProto(const RankReport& report);
RankReport FromProto(const v1::RankReport& report);

v1::Activity ToProto(const Activity& activity);
Activity FromProto(const v1::Activity& activity);

v1::Generation ToProto(const Generation& generation);
Generation FromProto(const v1::Generation& generation);

// Enumerators have the protocol's order, after its first, unspecified one.
template <typename Message, typename Value>
Message EnumToProto(Value value) {
  return static_cast<Message>(static_cast<int>(value) + 1);
}
inline v1::Plane ToProto(Plane plane) { return EnumToProto<v1::Plane>(plane); }
// INVALID_ARGUMENT for an unknown plane, here and below.
absl::StatusOr<Plane> FromProto(v1::Plane plane);
v1::PlaneSummary ToProto(const PlaneSummary& summary, Plane plane, bool with_sums);
// One with sums. INTERNAL: it has none, or not a protocol's number of words.
absl::StatusOr<PlaneSummary> FromProto(const v1::PlaneSummary& message);
v1::StateWrite ToProto(const StateWrite& write);
absl::StatusOr<StateWrite> FromProto(const v1::StateWrite& write);

inline v1::DType ToProto(DType dtype) { return EnumToProto<v1::DType>(dtype); }
inline v1::StateFormat ToProto(StateFormat format) { return EnumToProto<v1::StateFormat>(format); }
inline v1::UpdateMode ToProto(UpdateMode mode) { return EnumToProto<v1::UpdateMode>(mode); }
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
// J of "jobs/J" and of all names with that prefix; its last part, for example G of
// "jobs/J/groups/G". `name` itself if it has another form.
std::string JobOf(const std::string& name);
std::string BareName(const std::string& name);

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_CONVERT_H_
