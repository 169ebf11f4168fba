// The transport of a session over a gRPC channel.
#ifndef BALLAST_CLIENT_TRANSPORT_GRPC_TRANSPORT_H_
#define BALLAST_CLIENT_TRANSPORT_GRPC_TRANSPORT_H_

#include <grpcpp/channel.h>

#include <memory>

#include "absl/time/time.h"
#include "client/transport/transport.h"

namespace ballast::client {

// Calls that only read or change a little end with DEADLINE_EXCEEDED after `short_limit`. Calls
// that allocate or move the state of a whole job end after an hour.
std::unique_ptr<Transport> MakeGrpcTransport(std::shared_ptr<grpc::Channel> channel,
                                             absl::Duration short_limit);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_GRPC_TRANSPORT_H_
