// What a client gets whose request is no message: gRPC's own answer names nothing.
#ifndef BALLAST_SERVER_MALFORMED_REQUESTS_H_
#define BALLAST_SERVER_MALFORMED_REQUESTS_H_

#include <grpcpp/server_builder.h>

namespace ballast::server {

// Calls whose request gRPC parses and cannot end with INVALID_ARGUMENT, which names the message
// that was expected. Streams and calls that take bytes parse them themselves (proto/frame.h).
void ExplainMalformedRequests(grpc::ServerBuilder& builder);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_MALFORMED_REQUESTS_H_
