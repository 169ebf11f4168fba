#include "server/train/train_service.h"

#include "server/train/train_stream.h"
#include "server/train/upload_stream.h"
#include "server/train/weights_reader.h"

namespace ballast::server {

TrainService::TrainService(const Engine& engine, const Access& access, CallPools& pools)
    : RawService(access) {
  Bidi("Train", [&engine, &pools](grpc::CallbackServerContext& context,
                                  const absl::StatusOr<Caller>& caller) {
    return new TrainStream(engine, pools, context, caller);
  });
  Reads("UploadWeights", [&engine, &pools](grpc::CallbackServerContext& context,
                                           const absl::StatusOr<Caller>& caller, Bytes& response) {
    return new UploadStream(engine, pools, context, caller, response);
  });
  Writes("ReadWeights",
         [&engine, &pools](grpc::CallbackServerContext& context,
                           const absl::StatusOr<Caller>& caller, const Bytes& request) {
           return new WeightsReader(engine, pools, context, caller, request);
         });
}

}  // namespace ballast::server
