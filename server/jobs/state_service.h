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

// As of JobService, requests come as bytes.
using StateServiceBase = v1::StateService::WithRawCallbackMethod_ReadState<
    v1::StateService::WithRawCallbackMethod_SummarizeState<
        v1::StateService::WithRawCallbackMethod_SaveJob<
            v1::StateService::WithRawCallbackMethod_LoadJob<
                v1::StateService::WithRawCallbackMethod_ListCheckpoints<
                    v1::StateService::WithRawCallbackMethod_VerifyCheckpoints<
                        v1::StateService::WithRawCallbackMethod_WriteState<
                            v1::StateService::WithRawCallbackMethod_DeleteCheckpoint<
                                v1::StateService::Service>>>>>>>>;

// Thread-safe. The engine, the access, the pools and the paths outlive its calls. The methods only start a
// call; its work is done in a pool.
class StateService final : public StateServiceBase {
 public:
  StateService(Engine& engine, const Access& access, CallPools& pools, const CheckpointPaths& paths)
      : engine_(engine), access_(access), pools_(pools), paths_(paths) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* ReadState(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* WriteState(grpc::CallbackServerContext* context,
                                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* SummarizeState(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* SaveJob(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* LoadJob(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListCheckpoints(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* VerifyCheckpoints(grpc::CallbackServerContext* context,
                                              const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* DeleteCheckpoint(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) override;

 private:
  void Summarize(UnaryCall& call, const v1::SummarizeStateRequest& request);
  void Save(UnaryCall& call, const v1::SaveJobRequest& request);
  void Load(UnaryCall& call, const v1::LoadJobRequest& request);
  void List(UnaryCall& call, const v1::ListCheckpointsRequest& request);
  void Verify(UnaryCall& call, const v1::VerifyCheckpointsRequest& request);
  void Delete(UnaryCall& call, const v1::DeleteCheckpointRequest& request);

  Engine& engine_;
  const Access& access_;
  CallPools& pools_;
  const CheckpointPaths& paths_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_STATE_SERVICE_H_
