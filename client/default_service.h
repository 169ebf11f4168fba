// Where programs look for a service without an address.
#ifndef BALLAST_CLIENT_DEFAULT_SERVICE_H_
#define BALLAST_CLIENT_DEFAULT_SERVICE_H_

#include <cstdint>
#include <string>

namespace ballast::client {

inline constexpr char kPackagedSocket[] = "/run/ballast/ballastd.sock";

// The address in BALLAST_SERVICE. Else 127.0.0.1:PORT. If nothing listens there and the packaged
// service's unix socket exists, that socket.
std::string DefaultService(uint16_t port = 7070, const std::string& socket = kPackagedSocket);

// The lasting service of this host: the address in BALLAST_SERVICE if that is a unix socket, else the
// packaged service's socket.
std::string NodeServiceAddress();

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_DEFAULT_SERVICE_H_
