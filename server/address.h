// Addresses to listen on.
#ifndef BALLAST_SERVER_ADDRESS_H_
#define BALLAST_SERVER_ADDRESS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast::server {

struct Address {
  std::string text;       // In gRPC's form.
  std::string host;       // Empty for a unix socket.
  int port = 0;           // 0: the system chooses.
  std::string unix_path;  // Empty for TCP.

  std::string folder() const;  // That the unix socket is in.
};

// "HOST:PORT", "[IPV6]:PORT" or "unix:/path". INVALID_ARGUMENT otherwise.
absl::StatusOr<Address> ParseAddress(const std::string& text);

// Whether only this host can reach it: a unix socket, localhost, 127.0.0.0/8 or ::1.
bool IsLocal(const Address& address);

// UNAVAILABLE if another process listens on this unix socket, or if that cannot be told:
// Listener::Add would silently take its place.
absl::Status CheckUnixSocketIsFree(const Address& address);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ADDRESS_H_
