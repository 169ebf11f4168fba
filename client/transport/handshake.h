// Why a handshake with a service failed, where its reason is a certificate: no wait mends that.
#ifndef BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_
#define BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_

#include <grpcpp/support/status.h>

#include <string>

#include "client/credentials.h"

namespace ballast::client {

// Of the status of a call that needed a connection with these credentials: one line that names the
// file and says what to do. Empty: there is another reason, or none.
std::string WhyHandshakeFailed(const grpc::Status& status, const Credentials& credentials);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_HANDSHAKE_H_
