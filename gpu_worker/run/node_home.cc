#include "gpu_worker/run/node_home.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/calls/cluster_services.h"
#include "client/connect.h"
#include "client/home.h"
#include "cpu_optimizer_service/common/plan/homes.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/log.h"
#include "gpu_worker/collective/share.h"

namespace ballast::worker {
namespace {

// With this host's address for any of its addresses. Empty: it has none of that kind.
std::string OnOwnHost(const std::string& address, const std::string& own_host) {
  const absl::string_view port = absl::string_view(address).substr(address.rfind(':') + 1);
  const bool is_ipv6 = absl::StrContains(own_host, ':');
  if (absl::StartsWith(address, "[::]:")) {
    return is_ipv6 ? absl::StrCat("[", own_host, "]:", port) : absl::StrCat(own_host, ":", port);
  }
  if (!absl::StartsWith(address, "0.0.0.0:")) return address;
  return is_ipv6 ? std::string() : absl::StrCat(own_host, ":", port);
}

// A worker that has none tells the others why, so that none of them waits for it.
absl::StatusOr<std::vector<NodeService>> Gather(const absl::StatusOr<NodeService>& own,
                                                Collective& collective) {
  const std::string said = own.ok() ? absl::StrCat(own->node, "\n", own->id, "\n", own->address)
                                    : std::string(own.status().message());
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> texts, ShareText(said, collective));
  BALLAST_RETURN_IF_ERROR(own.status());
  std::vector<NodeService> all;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const std::vector<std::string> lines = absl::StrSplit(texts[rank], '\n');
    if (lines.size() != 3) {
      return absl::UnavailableError(
          absl::StrCat("worker ", rank, " has no service on its node: ", texts[rank]));
    }
    all.push_back({.node = lines[0], .id = lines[1], .address = lines[2]});
  }
  return all;
}

// Members and homes as rank 0 has them: in which order, and whose home each one is. `asked`: why it
// does not know.
absl::Status TakeThoseOfRankZero(const std::vector<MemberSpec>& known, const absl::Status& asked,
                                 JobSpec& job, Collective& collective) {
  std::vector<int> said = {asked.ok() ? 1 : 0};
  for (const MemberSpec& member : job.members) {
    said.push_back(static_cast<int>(std::find(known.begin(), known.end(), member) - known.begin()));
  }
  said.insert(said.end(), job.homes.begin(), job.homes.end());
  BALLAST_RETURN_IF_ERROR(collective.Broadcast(
      {reinterpret_cast<std::byte*>(said.data()), said.size() * sizeof(said[0])}));
  BALLAST_RETURN_IF_ERROR(asked);
  if (said[0] == 0) return absl::UnavailableError("worker 0 cannot ask its service for the job");
  for (size_t member = 0; member < known.size(); ++member)
    job.members[member] = known[said[1 + member]];
  std::copy(said.begin() + 1 + static_cast<std::ptrdiff_t>(known.size()), said.end(),
            job.homes.begin());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectNodeHome(
    const std::shared_ptr<grpc::Channel>& own, const std::string& own_host,
    const client::Credentials& credentials, JobSpec& job, Collective& collective) {
  absl::StatusOr<NodeService> service = client::IdentifyService(own);
  if (service.ok()) service->address = OnOwnHost(service->address, own_host);
  BALLAST_ASSIGN_OR_RETURN(const std::vector<NodeService> all, Gather(service, collective));
  BALLAST_RETURN_IF_ERROR(SpreadOverNodes(all, job));
  if (job.members.empty()) return own;
  const std::vector<MemberSpec> known = job.members;
  const absl::Status asked =
      collective.rank() == 0 ? client::TakeRecordedHomes(own, job) : absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(TakeThoseOfRankZero(known, asked, job, collective));
  const std::string& home = job.members[job.home(collective.rank())].address;
  if (home == service->address) return own;
  Log().warn(
      "the part of rank {} of job {} is at {}, and the rank is on {} now: gradients and "
      "weights go over the network",
      collective.rank(), job.name, home, service->node);
  return client::Connect(home, absl::Seconds(10), credentials);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectClusterHome(
    const std::string& address, const client::Credentials& credentials, JobSpec& job,
    Collective& collective) {
  absl::StatusOr<std::string> found = "";
  if (collective.rank() == 0) found = client::FindServices(address, job, credentials);
  // A worker that finds none tells the others why, so that none of them waits for it.
  const std::string said = found.ok() ? *found : absl::StrCat("\n", found.status().message());
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> texts, ShareText(said, collective));
  BALLAST_RETURN_IF_ERROR(found.status());
  if (absl::StartsWith(texts[0], "\n")) {
    return absl::UnavailableError(absl::StrCat("worker 0 finds no services: ", texts[0].substr(1)));
  }
  return client::ConnectHome(texts[0], collective.rank(), job, absl::Seconds(10), credentials);
}

}  // namespace ballast::worker
