#include "cpu_optimizer_service/common/system/version.h"

#include <cstdlib>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ballast {
namespace {

constexpr absl::string_view kName = "ballast/";

struct Release {
  int major = 0;
  int minor = 0;
};

// Of "0.1.0".
std::optional<Release> ParseRelease(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '.');
  Release release;
  // The third number does not matter: it says nothing about who works with whom.
  if (parts.size() < 2 || !absl::SimpleAtoi(parts[0], &release.major) ||
      !absl::SimpleAtoi(parts[1], &release.minor) || release.major < 0 || release.minor < 0) {
    return std::nullopt;
  }
  return release;
}

}  // namespace

// In a file of its own, which the build makes: it is another one after each commit.
extern const char kBallastBuild[];

std::string BallastVersion() { return BALLAST_VERSION; }

std::string VersionAndBuild() {
  return absl::StrCat(BallastVersion(), " (build ", kBallastBuild, ")");
}

std::string BallastUserAgent() { return absl::StrCat(kName, BallastVersion()); }

absl::Status CheckClientVersion(absl::string_view user_agent, absl::string_view service_version) {
  if (!absl::ConsumePrefix(&user_agent, kName)) return absl::OkStatus();
  // gRPC puts its own name behind ours, after a blank.
  const absl::string_view version = user_agent.substr(0, user_agent.find(' '));
  const std::optional<Release> client = ParseRelease(version);
  const std::optional<Release> service = ParseRelease(service_version);
  if (!client.has_value() || !service.has_value()) return absl::OkStatus();
  if (client->major == service->major && std::abs(client->minor - service->minor) <= 1) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "Ballast client ", version, " and service ", service_version,
      " are incompatible: minor versions may differ by one; install the same release on both"));
}

}  // namespace ballast
