// Which release this is, and which releases of client and service work together: those of one major
// version whose minor versions are the same or neighbours. So a service can be replaced by its next
// release before its clients are, or after.
//
// A client says its release at the beginning of its user agent, "ballast/0.1.0"; clients that are not
// ours need not say any.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VERSION_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VERSION_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast {

std::string BallastVersion();   // "0.1.0".
std::string VersionAndBuild();  // "0.1.0 (build acbdb20)".
// What a client's user agent begins with.
std::string BallastUserAgent();

// FAILED_PRECONDITION: a client with this user agent does not work with a service of this release.
absl::Status CheckClientVersion(absl::string_view user_agent,
                                absl::string_view service_version = BallastVersion());

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VERSION_H_
