// StateService: looks at optimizer state by name; saves and loads it.
#ifndef BALLAST_SERVER_JOBS_STATE_SERVICE_H_
#define BALLAST_SERVER_JOBS_STATE_SERVICE_H_

#include "ballast/v1/ballast.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"

namespace ballast::server {

// Thread-safe. The engine outlives it.
class StateService final : public v1::StateService::Service {
 public:
  explicit StateService(Engine& engine) : engine_(engine) {}

  grpc::Status ReadState(grpc::ServerContext*, const v1::ReadStateRequest* request,
                         grpc::ServerWriter<v1::ReadStateResponse>* writer) override;
  grpc::Status SummarizeState(grpc::ServerContext*, const v1::SummarizeStateRequest* request,
                              v1::StateSummary* response) override;
  grpc::Status SaveJob(grpc::ServerContext*, const v1::SaveJobRequest* request,
                       v1::SaveJobResponse* response) override;
  grpc::Status LoadJob(grpc::ServerContext*, const v1::LoadJobRequest* request,
                       v1::LoadJobResponse* response) override;

 private:
  Engine& engine_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_STATE_SERVICE_H_
