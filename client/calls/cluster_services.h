// Which services of a cluster hold a job: those of its record in etcd, or, for a new job, those that
// have room for it.
#ifndef BALLAST_CLIENT_CALLS_CLUSTER_SERVICES_H_
#define BALLAST_CLIENT_CALLS_CLUSTER_SERVICES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/credentials.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "proto/cluster/cluster.h"

namespace ballast::client {

// etcd is reached with BALLAST_ETCD_CA, _CERT, _KEY, _USER and _PASSWORD_FILE. INVALID_ARGUMENT: they
// or the address are wrong.
absl::StatusOr<std::unique_ptr<cluster::Cluster>> OpenCluster(absl::string_view address);

// For one rank of a job, which tells the others: "a:7070" or "a:7070,b:7070", rank 0's home first.
// `address`: "etcd://HOST:PORT/PREFIX", with "?members=N" or "?members=all" for a new job; else the
// fewest services that have room. If the job has a record: its services, without those that have
// left the cluster. FAILED_PRECONDITION: its lead has. RESOURCE_EXHAUSTED: no services have room; the message has what each has.
// UNAVAILABLE: etcd or all services do not answer. NOT_FOUND: no service is registered.
absl::StatusOr<std::string> FindServices(absl::string_view address, const JobSpec& job,
                                         const Credentials& credentials);

// Waits until the job, of so many ranks, has a record, and returns its services. DEADLINE_EXCEEDED.
absl::StatusOr<std::string> AwaitServices(absl::string_view address, const JobSpec& job,
                                          absl::Duration timeout);

// For a tool: the service that leads the job of this name; another one of the cluster if there is no
// such job, or if `job` is empty. NOT_FOUND: no service is registered.
absl::StatusOr<std::string> FindLead(absl::string_view address, const std::string& job);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CALLS_CLUSTER_SERVICES_H_
