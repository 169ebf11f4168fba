// This release, and the rule which releases of client and service work together: the same major
// version, and the same or neighbouring minor versions. So a service may be upgraded before its
// clients, or after.
//
// A client states its release at the beginning of its user agent, "ballast/0.1.0". Other clients
// need not.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VERSION_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VERSION_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast {

std::string BallastVersion();   // "0.1.0".
std::string VersionAndBuild();  // "0.1.0 (build acbdb20)".
// The beginning of a client's user agent.
std::string BallastUserAgent();

// FAILED_PRECONDITION: a client with this user agent does not work with a service of this release.
absl::Status CheckClientVersion(absl::string_view user_agent,
                                absl::string_view service_version = BallastVersion());

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VERSION_H_
