// The identity of a service that a trainer starts: a key of its own, and a certificate that no
// authority has signed. Who trusts exactly this certificate knows that the other end has the key.
#ifndef BALLAST_CLIENT_C_API_SELF_SIGNED_H_
#define BALLAST_CLIENT_C_API_SELF_SIGNED_H_

#include <string>

#include "absl/status/statusor.h"

namespace ballast::client {

struct Identity {
  std::string certificate;  // PEM. It signs no other certificate, and does not expire.
  std::string key;          // PEM.
};

// For a service that is reached at `host`, an IP address without brackets. INVALID_ARGUMENT:
// `host` is no IP address.
absl::StatusOr<Identity> MakeIdentity(const std::string& host);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_SELF_SIGNED_H_
