// Where programs look for a service if nobody says where it is.
#ifndef BALLAST_CLIENT_DEFAULT_SERVICE_H_
#define BALLAST_CLIENT_DEFAULT_SERVICE_H_

#include <cstdint>
#include <string>

namespace ballast::client {

// What BALLAST_SERVICE says; else 127.0.0.1:PORT; or, if nothing listens there, the unix socket of
// the packaged service, if that is there.
std::string DefaultService(uint16_t port = 7070,
                           const std::string& socket = "/run/ballast/ballastd.sock");

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_DEFAULT_SERVICE_H_
