// Answers calls of undefined methods, because gRPC's own answer has no message.
#ifndef BALLAST_SERVER_UNKNOWN_METHODS_H_
#define BALLAST_SERVER_UNKNOWN_METHODS_H_

#include <grpcpp/server_builder.h>

#include <memory>

namespace ballast::server {

// Answers UNIMPLEMENTED, with the method and this release in the message. The result outlives the
// server.
std::unique_ptr<grpc::CallbackGenericService> AnswerUnknownMethods(grpc::ServerBuilder& builder);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_UNKNOWN_METHODS_H_
