// What grpcurl and the like ask: which services there are, and what their messages look like.
//
// gRPC's own reflection keeps a thread for each stream, and parses whatever comes.
#ifndef BALLAST_SERVER_REFLECTION_H_
#define BALLAST_SERVER_REFLECTION_H_

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/call_pool.h"

namespace ballast::server {

// Thread-safe. Answers every caller: it says nothing of jobs. The pools outlive its calls.
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
