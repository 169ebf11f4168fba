// Why a handshake with a service failed, if the reason is a certificate.
#ifndef BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_
#define BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/time/time.h"
#include "client/credentials.h"

namespace ballast::client {

// After so long a reason is permanent, and waiting does not help: certificates have been replaced
// on both sides by then.
inline constexpr absl::Duration kRotation = absl::Seconds(2);

// For the status of a call that needed a connection to `target` with these credentials: one line
// that names the file and says what to do. Empty: no reason, or another one.
//
// With TLS 1.3 a service learns who the client is only after the client's part of the handshake,
// and gRPC then just closes the connection. If the status says that it was closed, and at which
// address, this function repeats the handshake there twice, within five seconds. It returns a
// reason if the service gives one both times. It also does in another case: the client trusts the
// service, the service requested a certificate, got none or one of an unlisted authority, and
// closed again.
std::string WhyHandshakeFailed(const grpc::Status& status, const std::string& target,
                               const Credentials& credentials);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_
