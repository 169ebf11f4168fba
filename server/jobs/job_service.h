// JobService: creates, finds, joins, traces and closes jobs.
#ifndef BALLAST_SERVER_JOBS_JOB_SERVICE_H_
#define BALLAST_SERVER_JOBS_JOB_SERVICE_H_

#include "ballast/v1/ballast.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/call_pool.h"
#include "server/jobs/unary_call.h"
#include "server/shared_memory/shared_memory_server.h"

namespace ballast::server {

// Calls with a description come as bytes: it takes many times its bytes when it is parsed, so that
// is done when there is a thread for it, and room (job_description.h).
using JobServiceBase = v1::JobService::WithRawCallbackMethod_CreateJob<
    v1::JobService::WithRawCallbackMethod_AttachWorker<v1::JobService::WithCallbackMethod_GetJob<
        v1::JobService::WithCallbackMethod_ListJobs<v1::JobService::WithCallbackMethod_CloseJob<
            v1::JobService::WithCallbackMethod_AbortStep<
                v1::JobService::WithCallbackMethod_UndoStep<
                    v1::JobService::WithCallbackMethod_UpdateGroup<
                        v1::JobService::WithCallbackMethod_TraceJob<
                            v1::JobService::Service>>>>>>>>>;

// Thread-safe. The engine, the access, the pools and the server of shared memory outlive its calls. The methods
// only start a call (unary_call.h); its work is done in a pool.
class JobService final : public JobServiceBase {
 public:
  // `shared_memory_server` is null if no memory is shared with workers.
  JobService(Engine& engine, const Access& access, CallPools& pools,
             SharedMemoryServer* shared_memory_server)
      : engine_(engine),
        access_(access),
        pools_(pools),
        shared_memory_server_(shared_memory_server) {}

  grpc::ServerUnaryReactor* CreateJob(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const v1::GetJobRequest* request, v1::Job* response) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override;
  grpc::ServerUnaryReactor* CloseJob(grpc::CallbackServerContext* context,
                                     const v1::CloseJobRequest* request,
                                     v1::CloseJobResponse* response) override;
  grpc::ServerUnaryReactor* AttachWorker(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* AbortStep(grpc::CallbackServerContext* context,
                                      const v1::AbortStepRequest* request,
                                      v1::AbortStepResponse* response) override;
  grpc::ServerUnaryReactor* UndoStep(grpc::CallbackServerContext* context,
                                     const v1::UndoStepRequest* request,
                                     v1::UndoStepResponse* response) override;
  grpc::ServerUnaryReactor* UpdateGroup(grpc::CallbackServerContext* context,
                                        const v1::UpdateGroupRequest* request,
                                        v1::ParamGroup* response) override;
  // Answers when the steps are committed: after an hour at most, and with a deadline after nine
  // tenths of the time that is given, so that what there is by then still arrives.
  grpc::ServerWriteReactor<v1::TraceJobResponse>* TraceJob(
      grpc::CallbackServerContext* context, const v1::TraceJobRequest* request) override;

 private:
  void Create(UnaryCall& call, const grpc::ByteBuffer& request, grpc::ByteBuffer& response);
  void Close(UnaryCall& call, const v1::CloseJobRequest& request);
  void Attach(UnaryCall& call, const grpc::ByteBuffer& request, grpc::ByteBuffer& response);
  void Abort(UnaryCall& call, const v1::AbortStepRequest& request, v1::AbortStepResponse& response);
  void Undo(UnaryCall& call, const v1::UndoStepRequest& request, v1::UndoStepResponse& response);

  Engine& engine_;
  const Access& access_;
  CallPools& pools_;
  SharedMemoryServer* const shared_memory_server_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_JOB_SERVICE_H_
