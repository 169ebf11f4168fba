// How a client knows that a service is the right one, and how it says who it is.
#ifndef BALLAST_CLIENT_CREDENTIALS_H_
#define BALLAST_CLIENT_CREDENTIALS_H_

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace ballast::client {

// All are paths, and empty where there is none. They are read again when they change: connections
// and calls that are begun later use what they have then.
struct Credentials {
  // Connections of TCP speak TLS, with a service whose certificate these authorities have signed.
  std::string tls_ca;
  // This client's certificate, a chain in the form of PEM, and its key, which others may not read.
  std::string tls_cert;
  std::string tls_key;
  // A file that others may not read, with a token, which is sent with each call, over TLS or a unix
  // socket.
  std::string token_file;
};

// `given`, and what BALLAST_TLS_CA, BALLAST_TLS_CERT, BALLAST_TLS_KEY and BALLAST_TOKEN_FILE say
// where a field of it is empty.
Credentials OrEnvironment(Credentials given);

// For a channel to `target`. Unix sockets need no TLS, and read no files of it. INVALID_ARGUMENT, in
// one line: a file is missing or wrong, a certificate is without its key, a token without TLS.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const std::string& target, const Credentials& credentials);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CREDENTIALS_H_
