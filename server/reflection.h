// Reflection for grpcurl and similar tools: the services, and the fields of their messages.
//
// gRPC's own reflection keeps a thread for each stream and parses everything: one message of 31 MiB
// takes 2 GiB. Here a message with too many bytes or fields is refused first.
#ifndef BALLAST_SERVER_REFLECTION_H_
#define BALLAST_SERVER_REFLECTION_H_

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/call_pool.h"

namespace ballast::server {

// Thread-safe. Answers every caller: it reveals nothing about jobs. The pools outlive its calls.
class Reflection final : public grpc::reflection::v1alpha::ServerReflection::
                             WithRawCallbackMethod_ServerReflectionInfo<
                                 grpc::reflection::v1alpha::ServerReflection::Service> {
 public:
  explicit Reflection(CallPools& pools) : pools_(pools) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServerReflectionInfo(
      grpc::CallbackServerContext* context) override;

 private:
  CallPools& pools_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_REFLECTION_H_
