// What is done with every call apart from its service.
#ifndef BALLAST_SERVER_INTERCEPTORS_H_
#define BALLAST_SERVER_INTERCEPTORS_H_

#include <grpcpp/server_builder.h>

#include <memory>

#include "server/reset_watch.h"

namespace ballast::server {

// Errors that gRPC makes say what is wrong: calls that bring no whole request end with
// INVALID_ARGUMENT, which names the message that was expected; those of a method that there is not
// with UNIMPLEMENTED. Services parse the requests of their calls themselves (proto/frame.h).
//
// Calls that their client gives up, that bring no request, or whose caller is not known are reported
// to `resets`, which outlives the server. Streams of requests, and calls of other services than
// ours, are reported when they begin: each message would pass here otherwise, and an honest client
// opens few of them on a connection.
//
// What is returned outlives the server, too.
std::unique_ptr<grpc::CallbackGenericService> InterceptCalls(grpc::ServerBuilder& builder,
                                                             ResetWatch& resets);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_INTERCEPTORS_H_
