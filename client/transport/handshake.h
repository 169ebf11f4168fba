// Why a handshake with a service failed, where its reason is a certificate.
#ifndef BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_
#define BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/time/time.h"
#include "client/credentials.h"

namespace ballast::client {

// A reason that goes for so long is no passing one, and no wait mends it: what changes certificates
// on both sides is done.
inline constexpr absl::Duration kRotation = absl::Seconds(2);

// Of the status of a call that needed a connection to `target` with these credentials: one line that
// names the file and says what to do. Empty: there is another reason, or none.
//
// With TLS 1.3 a service learns who the client is after the client's part of the handshake, and
// gRPC's just closes the connection then. Where the status says that it was closed, and at which
// address, this shakes hands there twice more, within five seconds. It says why if the service does, both times; or if the client
// trusts it, it asked for a certificate, got none or one of an authority that it had not named, and
// closed again.
std::string WhyHandshakeFailed(const grpc::Status& status, const std::string& target,
                               const Credentials& credentials);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_
