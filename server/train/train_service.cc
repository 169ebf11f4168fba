#include "server/train/train_service.h"

#include "server/train/train_stream.h"
#include "server/train/upload_stream.h"
#include "server/train/weights_reader.h"

namespace ballast::server {

// In gRPC's callback API the reactors own themselves.

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* TrainService::Train(
    grpc::CallbackServerContext* context) {
  return new TrainStream(engine_, pools_, *context);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* TrainService::UploadWeights(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return new UploadStream(engine_, pools_, *context, *response);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* TrainService::ReadWeights(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  return new WeightsReader(engine_, pools_, *context, *request);
}

}  // namespace ballast::server
