// --check-config: whether the service would start with these flags and files. As root it checks as
// the service's user, because root can read and write everything.
#ifndef BALLAST_SERVER_BALLASTD_CONFIG_CHECK_H_
#define BALLAST_SERVER_BALLASTD_CONFIG_CHECK_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/ballastd/ballastd_flags.h"

namespace ballast::server {

// The user in the package's unit.
inline constexpr char kServiceUser[] = "ballast";

// Makes this process permanently the user's, by name or number, with the user's groups. Empty:
// kServiceUser's, if this is root and the user exists. Returns the user's name; empty: no change.
// INVALID_ARGUMENT: the user does not exist. PERMISSION_DENIED: only root can change the user.
absl::StatusOr<std::string> BecomeUser(const std::string& user);

// Whether the service could write to the directories of the flags. Creates no directory. Errors are
// one line.
absl::Status CheckPlaces(const BallastdFlags& flags);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_CONFIG_CHECK_H_
