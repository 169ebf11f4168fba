// How a client authenticates a service and itself.
#ifndef BALLAST_CLIENT_CREDENTIALS_H_
#define BALLAST_CLIENT_CREDENTIALS_H_

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace ballast::client {

// All are paths; empty: not used. The files are read again when they change. Later connections and
// calls use the new contents.
struct Credentials {
  // TCP connections use TLS, and the service's certificate must be signed by these authorities.
  std::string tls_ca;
  // This client's certificate, a PEM chain, and its key, which other users must not be able to
  // read.
  std::string tls_cert;
  std::string tls_key;
  // A file with a token, which other users must not be able to read. The token is sent with each
  // call, over TLS or a unix socket.
  std::string token_file;
};

// `given`, with empty fields from BALLAST_TLS_CA, BALLAST_TLS_CERT, BALLAST_TLS_KEY and
// BALLAST_TOKEN_FILE.
Credentials OrEnvironment(Credentials given);

// For a channel to `target`. Unix sockets do not use TLS, so its files are not read.
// INVALID_ARGUMENT, in one line: a file is missing or wrong, a certificate has no key, or a token
// has no TLS.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const std::string& target, const Credentials& credentials);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CREDENTIALS_H_
