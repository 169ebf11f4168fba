#include "server/train/train_service.h"

#include "server/call_guard.h"
#include "server/train/train_stream.h"
#include "server/train/upload_stream.h"
#include "server/train/weights_reader.h"

namespace ballast::server {

// In gRPC's callback API the reactors own themselves.

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* TrainService::Train(
    grpc::CallbackServerContext* context) {
  // Also for a caller that is not admitted: only a reactor can end the call with the reason.
  return MakeReactor<grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>>([&] {
    return new TrainStream(engine_, pools_, *context,
                           access_.Admit(*context, "TrainService.Train"));
  });
}

grpc::ServerReadReactor<grpc::ByteBuffer>* TrainService::UploadWeights(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return MakeReactor<grpc::ServerReadReactor<grpc::ByteBuffer>>([&] {
    return new UploadStream(engine_, pools_, *context,
                            access_.Admit(*context, "TrainService.UploadWeights"), *response);
  });
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* TrainService::ReadWeights(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  return MakeReactor<grpc::ServerWriteReactor<grpc::ByteBuffer>>([&] {
    return new WeightsReader(engine_, pools_, *context,
                             access_.Admit(*context, "TrainService.ReadWeights"), *request);
  });
}

}  // namespace ballast::server
