// StateService: looks at optimizer state by name; saves and loads it.
#ifndef BALLAST_SERVER_JOBS_STATE_SERVICE_H_
#define BALLAST_SERVER_JOBS_STATE_SERVICE_H_

#include <string>

#include "ballast/v1/ballast.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/call_pool.h"
#include "server/checkpoint_paths.h"
#include "server/jobs/unary_call.h"

namespace ballast::server {

// Thread-safe. The engine, the pools and the paths outlive its calls. The methods only start a
// call; its work is done in a pool.
class StateService final : public v1::StateService::CallbackService {
 public:
  StateService(Engine& engine, CallPools& pools, const CheckpointPaths& paths)
      : engine_(engine), pools_(pools), paths_(paths) {}

  grpc::ServerWriteReactor<v1::ReadStateResponse>* ReadState(
      grpc::CallbackServerContext*, const v1::ReadStateRequest* request) override;
  grpc::ServerUnaryReactor* SummarizeState(grpc::CallbackServerContext*,
                                           const v1::SummarizeStateRequest* request,
                                           v1::StateSummary* response) override;
  grpc::ServerUnaryReactor* SaveJob(grpc::CallbackServerContext* context,
                                    const v1::SaveJobRequest* request,
                                    v1::SaveJobResponse* response) override;
  grpc::ServerUnaryReactor* LoadJob(grpc::CallbackServerContext* context,
                                    const v1::LoadJobRequest* request,
                                    v1::LoadJobResponse* response) override;

 private:
  void Summarize(UnaryCall& call, const v1::SummarizeStateRequest& request,
                 v1::StateSummary& response);
  void Save(UnaryCall& call, const std::string& peer, const v1::SaveJobRequest& request,
            v1::SaveJobResponse& response);
  void Load(UnaryCall& call, const std::string& peer, const v1::LoadJobRequest& request,
            v1::LoadJobResponse& response);

  Engine& engine_;
  CallPools& pools_;
  const CheckpointPaths& paths_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_STATE_SERVICE_H_
