// --service=node: each rank's home is the lasting service of its node. --service=etcd://...: services
// of a cluster.
#ifndef BALLAST_GPU_WORKER_RUN_NODE_HOME_H_
#define BALLAST_GPU_WORKER_RUN_NODE_HOME_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/credentials.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "gpu_worker/collective/collective.h"

namespace ballast::worker {

// The channel to this rank's home: `own`, which leads to its node's service, or another node's, with
// a warning, if the job exists and the rank was there before. Fills in the members and homes of
// `job`, of which the name and the world size are read. `own_host` is this host's address for the
// other ranks, where a service listens on all addresses. All ranks call it. FAILED_PRECONDITION: as
// SpreadOverNodes. Other errors as in Connect.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectNodeHome(
    const std::shared_ptr<grpc::Channel>& own, const std::string& own_host,
    const client::Credentials& credentials, JobSpec& job, Collective& collective);

// The channel to this rank's home, on the services that rank 0 finds in the cluster for all
// (client::FindServices). Fills in the members and homes of `job`, of which all else is read. All
// ranks call it. Errors as in FindServices and Connect.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectClusterHome(
    const std::string& address, const client::Credentials& credentials, JobSpec& job,
    Collective& collective);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_NODE_HOME_H_
