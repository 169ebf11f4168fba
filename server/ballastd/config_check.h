// --check-config: whether the service would start with the flags and the files that they name. As
// root it looks as the user that the service runs as, because root may read and write everything.
#ifndef BALLAST_SERVER_BALLASTD_CONFIG_CHECK_H_
#define BALLAST_SERVER_BALLASTD_CONFIG_CHECK_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/ballastd/ballastd_flags.h"

namespace ballast::server {

// The user of the package's unit.
inline constexpr char kServiceUser[] = "ballast";

// From now on, and for good, this process is of that user, by name or number, and of its groups.
// Empty: of kServiceUser, if this is root and there is such a user. Returns the user's name; empty:
// it stays as it is. INVALID_ARGUMENT: there is no such user. PERMISSION_DENIED: only root becomes
// another.
absl::StatusOr<std::string> BecomeUser(const std::string& user);

// Whether the service could write where the flags say. Makes no directory. Errors are one line.
absl::Status CheckPlaces(const BallastdFlags& flags);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_CONFIG_CHECK_H_
