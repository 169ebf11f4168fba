#include "server/train/train_service.h"

#include "server/train/train_stream.h"
#include "server/train/upload_stream.h"
#include "server/train/weights_reader.h"

namespace ballast::server {

// In gRPC's callback API the reactors own themselves.

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* TrainService::Train(
    grpc::CallbackServerContext*) {
  return new TrainStream(engine_, pools_);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* TrainService::UploadWeights(grpc::CallbackServerContext*,
                                                                       grpc::ByteBuffer* response) {
  return new UploadStream(engine_, pools_, *response);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* TrainService::ReadWeights(
    grpc::CallbackServerContext*, const grpc::ByteBuffer* request) {
  return new WeightsReader(engine_, pools_, *request);
}

}  // namespace ballast::server
