// Which of several services holds which ranks of a job.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLAN_HOMES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLAN_HOMES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/job_spec.h"

namespace ballast {

// "a:7070, b:7070" as addresses, without the spaces around them; at least one. INVALID_ARGUMENT: one
// is empty or stands there twice. Their form is not checked.
absl::StatusOr<std::vector<std::string>> ParseServices(absl::string_view services);

// Fills in the job's members and homes: rank r of W has home r * M / W of M services. So each gets
// consecutive ranks, and at most one more than another. A single service is not named: both stay
// empty. INVALID_ARGUMENT, without a change: there are more services than ranks.
absl::Status SpreadRanks(const std::vector<std::string>& services, JobSpec& job);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLAN_HOMES_H_
