// JobService: creates, finds, joins, traces and closes jobs.
#ifndef BALLAST_SERVER_JOBS_JOB_SERVICE_H_
#define BALLAST_SERVER_JOBS_JOB_SERVICE_H_

#include "ballast/v1/ballast.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/call_pool.h"
#include "server/checkpoint_paths.h"
#include "server/jobs/unary_call.h"
#include "server/shared_memory/shared_memory_server.h"

namespace ballast::server {

// All requests come as bytes: parsed, they may take a hundred times as much, so they are measured,
// and parsed once it is known who calls, and when there is a thread for it (unary_call.h), and room
// (job_description.h).
using JobServiceBase = v1::JobService::WithRawCallbackMethod_CreateJob<
    v1::JobService::WithRawCallbackMethod_AttachWorker<
        v1::JobService::WithRawCallbackMethod_GetJob<v1::JobService::WithRawCallbackMethod_ListJobs<
            v1::JobService::WithRawCallbackMethod_CloseJob<
                v1::JobService::WithRawCallbackMethod_AbortStep<
                    v1::JobService::WithRawCallbackMethod_UndoStep<
                        v1::JobService::WithRawCallbackMethod_UpdateGroup<
                            v1::JobService::WithRawCallbackMethod_TraceJob<
                                v1::JobService::WithRawCallbackMethod_GetHistory<
                                    v1::JobService::Service>>>>>>>>>>;

// Thread-safe. The engine, the access, the pools, the paths and the server of shared memory outlive its
// calls. The methods only start a call (unary_call.h); its work is done in a pool.
class JobService final : public JobServiceBase {
 public:
  // `shared_memory_server` is null if no memory is shared with workers.
  JobService(Engine& engine, const Access& access, CallPools& pools, const CheckpointPaths& paths,
             SharedMemoryServer* shared_memory_server)
      : engine_(engine),
        access_(access),
        pools_(pools),
        paths_(paths),
        shared_memory_server_(shared_memory_server) {}

  grpc::ServerUnaryReactor* CreateJob(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CloseJob(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* AttachWorker(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* AbortStep(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* UndoStep(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* UpdateGroup(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  // Answers when the steps are committed: after an hour at most, and with a deadline after nine
  // tenths of the time that is given, so that what there is by then still arrives.
  grpc::ServerWriteReactor<grpc::ByteBuffer>* TraceJob(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* GetHistory(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;

 private:
  void Create(UnaryCall& call, const grpc::ByteBuffer& request);
  void Close(UnaryCall& call, const v1::CloseJobRequest& request);
  void Attach(UnaryCall& call, const grpc::ByteBuffer& request);
  void Abort(UnaryCall& call, const v1::AbortStepRequest& request);
  void Undo(UnaryCall& call, const v1::UndoStepRequest& request);

  Engine& engine_;
  const Access& access_;
  CallPools& pools_;
  const CheckpointPaths& paths_;
  SharedMemoryServer* const shared_memory_server_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_JOB_SERVICE_H_
