#include "cpu_optimizer_service/common/plan/homes.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {
namespace {

constexpr char kRemedy[] =
    "; start it with --listen=HOST:PORT,unix:PATH, and with --advertise=HOST:PORT if others reach "
    "it elsewhere";

bool IsLoopback(absl::string_view address) {
  return absl::StartsWith(address, "127.") || absl::StartsWith(address, "localhost:") ||
         absl::StartsWith(address, "[::1]:");
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseServices(absl::string_view services) {
  std::vector<std::string> addresses;
  std::set<absl::string_view> seen;
  for (const absl::string_view part : absl::StrSplit(services, ',')) {
    const absl::string_view address = absl::StripAsciiWhitespace(part);
    if (address.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", services,
                       "' has an empty address; give one service, or several with a comma between "
                       "each two: a:7070,b:7070"));
    }
    if (!seen.insert(address).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", services, "' names ", address, " twice; name each service once"));
    }
    addresses.emplace_back(address);
  }
  return addresses;
}

absl::Status SpreadRanks(const std::vector<std::string>& services, JobSpec& job) {
  if (services.size() < 2) return absl::OkStatus();
  const auto members = static_cast<int64_t>(services.size());
  const int ranks = job.layout.world_size;
  if (members > ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat(members, " services are named for ", ranks, ranks == 1 ? " rank" : " ranks",
                     ", and each needs a rank; name at most ", ranks));
  }
  job.members.clear();
  for (const std::string& address : services) job.members.push_back({.address = address});
  job.homes.clear();
  for (int rank = 0; rank < ranks; ++rank) {
    job.homes.push_back(static_cast<int>(rank * members / ranks));
  }
  return absl::OkStatus();
}

absl::Status SpreadOverNodes(const std::vector<NodeService>& of_ranks, JobSpec& job) {
  std::vector<size_t> firsts;  // The first rank of each member.
  std::vector<int> homes;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto known = std::find_if(firsts.begin(), firsts.end(), [&](size_t first) {
      return of_ranks[first].id == of_ranks[rank].id;
    });
    homes.push_back(static_cast<int>(known - firsts.begin()));
    if (known == firsts.end()) firsts.push_back(rank);
  }
  if (firsts.size() < 2) return absl::OkStatus();
  std::vector<MemberSpec> members;
  for (const size_t first : firsts) {
    const NodeService& service = of_ranks[first];
    const std::string& address = service.address;
    if (address.empty() || IsLoopback(address)) {
      const NodeService& other = of_ranks[firsts[first == 0 ? 1 : 0]];
      return absl::FailedPreconditionError(absl::StrCat(
          "node ", other.node, " cannot reach the service of node ", service.node,
          address.empty() ? "" : absl::StrCat(" at ", address, ", a loopback address"), kRemedy));
    }
    for (size_t earlier = 0; earlier < members.size(); ++earlier) {
      if (members[earlier].address != address) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("nodes ", of_ranks[firsts[earlier]].node, " and ", service.node,
                       " both say that their service is at ", address, kRemedy));
    }
    members.push_back({.address = address});
  }
  job.members = std::move(members);
  job.homes = std::move(homes);
  return absl::OkStatus();
}

}  // namespace ballast
