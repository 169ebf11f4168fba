// The JSON of what the page shows when it is asked for: a job's parameters, one parameter's
// distribution, and the timeline of a step.
#ifndef BALLAST_SERVER_STATUS_STATE_JSON_H_
#define BALLAST_SERVER_STATUS_STATE_JSON_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

// The first parameters whose name has `match` in it.
nlohmann::json ParametersJson(const Job& job, const std::string& match);

// Reads all of the parameter's state once. NOT_FOUND: the job has no such parameter. UNAVAILABLE:
// the job has no time for it for seconds. Blocks.
absl::StatusOr<nlohmann::json> DistributionJson(Job& job, const std::string& parameter);

// Of the next step that begins and is committed. UNAVAILABLE: none was within `patience_seconds`.
// RESOURCE_EXHAUSTED: another caller takes a timeline of the job. Blocks.
absl::StatusOr<nlohmann::json> TimelineJson(Job& job, int patience_seconds);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_STATE_JSON_H_
