// The channel of a rank whose job one or several services hold: it leads to the rank's home.
//
//   client::SessionOptions options{.job = spec, .rank = rank};
//   auto channel = client::ConnectHome("a:7070,b:7070", options.rank, options.job).value();
//   auto session = client::Session::Open(channel, std::move(options)).value();
#ifndef BALLAST_CLIENT_HOME_H_
#define BALLAST_CLIENT_HOME_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/credentials.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/plan/homes.h"

namespace ballast::client {

// `services`: one address, or several with commas between, the same on all ranks. Or that of a
// cluster, "etcd://HOST:PORT/PREFIX": rank 0 takes FindServices, and others wait for the record of the
// job that it creates. Several get
// consecutive ranks in even shares, which are written to job.members and job.homes; so rank 0's home
// is the first. If `job` has members already, they count. Then `services` is how this rank reaches
// its home, such as by its unix socket; empty: at the member's address. Of a job without members
// only layout.world_size is read. INVALID_ARGUMENT: an address is wrong or named twice, there are
// more services than ranks, or the rank does not exist. Other errors as in Connect.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectHome(
    const std::string& services, int rank, JobSpec& job, absl::Duration timeout = absl::Seconds(10),
    const Credentials& credentials = OrEnvironment({}));

// What the service itself says, in ListJobs. HOST of the address may be 0.0.0.0 or [::], which is any
// of its host. UNAVAILABLE: it does not answer.
absl::StatusOr<NodeService> IdentifyService(const std::shared_ptr<grpc::Channel>& channel);

// If the service has a job of this name and world size over these members, in any order, `job` gets
// its members and homes: an earlier run may have had its ranks on other nodes. Errors as above.
absl::Status TakeRecordedHomes(const std::shared_ptr<grpc::Channel>& channel, JobSpec& job);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_HOME_H_
