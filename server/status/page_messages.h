// The page's data as public messages. For large jobs they leave out what a page has no room for.
#ifndef BALLAST_SERVER_STATUS_PAGE_MESSAGES_H_
#define BALLAST_SERVER_STATUS_PAGE_MESSAGES_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/v1/diagnostics.pb.h"
#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/state.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/server.h"
#include "server/status/metrics.h"
#include "server/status/service_history.h"

namespace ballast::server {

// Without the operator's fields: settings, log, metrics, host and gates.
v1::ServiceDescription ProcessMessage(const Engine& engine, const Server& server,
                                      const ServiceHistory& history);

// The jobs that the viewer may see, each with the first ranks that others wait for.
v1::ListJobsResponse JobsMessage(const Engine& engine, const Viewer& viewer);
// With the ranks that others wait for, and as many others as fit.
v1::Job JobMessage(const Engine& engine, const Job& job);

// {"parameters": [...], "matches": N}: the first v1::Parameters whose names contain `match`, and
// the number of matches.
absl::StatusOr<std::string> ParametersJson(const Job& job, const std::string& match);

// Reads all of the parameter's state once. NOT_FOUND: the job has no such parameter. UNAVAILABLE:
// the job is busy for seconds. Blocks.
absl::StatusOr<v1::StateSummary> SummaryMessage(std::shared_ptr<Job> job,
                                                const std::string& parameter);

// For the next step that begins and is committed. UNAVAILABLE: no step within `patience_seconds`.
// RESOURCE_EXHAUSTED: another caller traces the job. Blocks.
absl::StatusOr<v1::TraceJobResponse> TraceMessage(std::shared_ptr<Job> job, int patience_seconds);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_PAGE_MESSAGES_H_
