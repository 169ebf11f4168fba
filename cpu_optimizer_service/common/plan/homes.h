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

// The service of a rank's node.
struct NodeService {
  std::string node;     // The host's name, for messages.
  std::string id;       // All ranks that reach this service have the same.
  std::string address;  // "HOST:PORT" for other nodes; empty: they cannot reach it.
};

// Fills in members and homes: a rank's home is its node's service, and rank 0's is the first. If all
// are on one node, both stay empty. FAILED_PRECONDITION, without a change: other nodes cannot reach a
// service, or two services are said to be at one address. One entry for each rank.
absl::Status SpreadOverNodes(const std::vector<NodeService>& of_ranks, JobSpec& job);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_PLAN_HOMES_H_
