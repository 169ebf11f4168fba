// A job's need of a service's memory, by the engine's arithmetic, with each option that changes it.
#ifndef BALLAST_CLIENT_CLI_SUPPORT_PLAN_H_
#define BALLAST_CLIENT_CLI_SUPPORT_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/v1/tool.pb.h"
#include "cpu_optimizer_service/common/job_spec.h"

namespace ballast::client::cli {

// `text` is a size such as "7B:bf16" or "1.5B:fp32:amsgrad", or a file with a job's description as
// CreateJob takes it (ballast.v1.Job in JSON). There groups without hyper-parameters have the
// defaults. Without partitions or a mesh the flat spaces are cut for `world_size` ranks; 0: the
// file's, or of a size `default_world_size`. INVALID_ARGUMENT, NOT_FOUND: one line.
absl::StatusOr<JobSpec> ReadPlanSpec(const std::string& text, int world_size,
                                     int default_world_size = 1);

// `limits`: of each member; or one, of all. INVALID_ARGUMENT: such a job cannot be created, or there
// are other limits than members.
absl::StatusOr<v1::JobPlan> MakePlan(JobSpec spec, const std::vector<int64_t>& limits);

bool FitsSomehow(const v1::JobPlan& plan);  // With some option.
std::string PlanText(const v1::JobPlan& plan);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_SUPPORT_PLAN_H_
