#include "cpu_optimizer_service/common/plan/homes.h"

#include <cstdint>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {

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

}  // namespace ballast
