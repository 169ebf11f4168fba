// Addresses to listen on.
#ifndef BALLAST_SERVER_ADDRESS_H_
#define BALLAST_SERVER_ADDRESS_H_

#include <sys/socket.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast::server {

struct Address {
  std::string text;       // In gRPC's form.
  std::string host;       // Empty for a unix socket.
  int port = 0;           // 0: the system chooses.
  std::string unix_path;  // Empty for TCP.

  std::string folder() const;  // The unix socket's folder.
};

// "HOST:PORT", "[IPV6]:PORT" or "unix:/path". INVALID_ARGUMENT otherwise.
absl::StatusOr<Address> ParseAddress(const std::string& text);

// Whether only this host can reach it: a unix socket, localhost, 127.0.0.0/8 or ::1.
bool IsLocal(const Address& address);

// INVALID_ARGUMENT, in one line, unless `text` is a "HOST:PORT" that other hosts may connect to.
absl::Status CheckAdvertised(const std::string& text);

// Of the addresses that a service listens on, in ParseAddress's form, the one at which other services
// reach it: the first of TCP that is not only this host's, or else the first of TCP. Empty: none.
std::string AdvertisedOf(const std::vector<std::string>& listening);

// UNAVAILABLE if another process listens on this unix socket, or if that is unknown:
// ListeningSockets::Add would silently replace it.
absl::Status CheckUnixSocketIsFree(const Address& address);

// gRPC's name for the peer of a TCP connection: "ipv4:127.0.0.1:50051" or "ipv6:%5B::1%5D:50051";
// for a link-local address with the link's number, "ipv6:%5Bfe80::1%254%5D:50051". Empty: not a TCP
// address.
std::string PeerAt(const sockaddr_storage& name);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ADDRESS_H_
