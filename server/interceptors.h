// What is done with every call beside its service.
#ifndef BALLAST_SERVER_INTERCEPTORS_H_
#define BALLAST_SERVER_INTERCEPTORS_H_

#include <grpcpp/server_builder.h>

#include "server/reset_watch.h"

namespace ballast::server {

// Errors that gRPC makes say what is wrong: calls whose request it parses and cannot end with
// INVALID_ARGUMENT, which names the message that was expected; those for whose reflection there is
// no thread with RESOURCE_EXHAUSTED. Streams and calls that take bytes parse them themselves
// (proto/frame.h).
//
// Calls that their client gives up, or whose request is none, are told to `resets`, which outlives
// the server. Streams of requests, and calls of other services than ours, are told when they begin:
// each message would come by here otherwise, and an honest client opens few of them on a
// connection.
void InterceptCalls(grpc::ServerBuilder& builder, ResetWatch& resets);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_INTERCEPTORS_H_
