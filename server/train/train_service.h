// TrainService: the data path. Its messages are received and sent as bytes, so that payloads are
// not copied into messages.
#ifndef BALLAST_SERVER_TRAIN_TRAIN_SERVICE_H_
#define BALLAST_SERVER_TRAIN_TRAIN_SERVICE_H_

#include "ballast/v1/ballast.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/access/access.h"
#include "server/call_pool.h"

namespace ballast::server {

// Thread-safe. The engine, the access and the pools outlive its calls.
class TrainService final
    : public v1::TrainService::WithRawCallbackMethod_Train<
          v1::TrainService::WithRawCallbackMethod_UploadWeights<
              v1::TrainService::WithRawCallbackMethod_ReadWeights<v1::TrainService::Service>>> {
 public:
  TrainService(const Engine& engine, const Access& access, CallPools& pools)
      : engine_(engine), access_(access), pools_(pools) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Train(
      grpc::CallbackServerContext*) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* UploadWeights(grpc::CallbackServerContext*,
                                                           grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* ReadWeights(grpc::CallbackServerContext*,
                                                          const grpc::ByteBuffer* request) override;

 private:
  const Engine& engine_;
  const Access& access_;
  CallPools& pools_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_TRAIN_SERVICE_H_
