// TrainService: the data path. Its messages are received and sent as bytes, so that payloads are
// not copied into messages.
#ifndef BALLAST_SERVER_TRAIN_TRAIN_SERVICE_H_
#define BALLAST_SERVER_TRAIN_TRAIN_SERVICE_H_

#include "ballast/v1/train.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/access/access.h"
#include "server/call_pool.h"
#include "server/raw_service.h"

namespace ballast::server {

// Thread-safe. The engine, the access and the pools outlive its calls.
class TrainService final : public RawService<v1::TrainService> {
 public:
  TrainService(const Engine& engine, const Access& access, CallPools& pools);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_TRAIN_SERVICE_H_
