#include "client/home.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/connect.h"
#include "cpu_optimizer_service/common/plan/homes.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client {

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectHome(const std::string& services, int rank,
                                                           JobSpec& job, absl::Duration timeout,
                                                           const Credentials& credentials) {
  const bool has_members = !job.members.empty();
  if (!has_members) {
    BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> addresses, ParseServices(services));
    // Session::Open checks the rank.
    if (addresses.size() == 1) return Connect(addresses[0], timeout, credentials);
    BALLAST_RETURN_IF_ERROR(SpreadRanks(addresses, job));
  } else {
    BALLAST_RETURN_IF_ERROR(Validate(job));
  }
  // All ranks get the same error, also those with another home.
  for (const MemberSpec& member : job.members) {
    BALLAST_RETURN_IF_ERROR(CheckAddress(member.address));
  }
  if (rank < 0 || rank >= job.layout.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " is not in a world of size ", job.layout.world_size));
  }
  const std::string& home = job.members[job.home(rank)].address;
  return Connect(has_members && !services.empty() ? services : home, timeout, credentials);
}

}  // namespace ballast::client
