// JobService: creates, finds, joins and closes jobs.
#ifndef BALLAST_SERVER_JOBS_JOB_SERVICE_H_
#define BALLAST_SERVER_JOBS_JOB_SERVICE_H_

#include "ballast/v1/ballast.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/shared_memory/shared_memory_server.h"

namespace ballast::server {

// Thread-safe. The engine and the server of shared memory outlive its calls.
class JobService final : public v1::JobService::Service {
 public:
  // `shared_memory_server` is null if no memory is shared with workers.
  JobService(Engine& engine, SharedMemoryServer* shared_memory_server)
      : engine_(engine), shared_memory_server_(shared_memory_server) {}

  grpc::Status CreateJob(grpc::ServerContext*, const v1::CreateJobRequest* request,
                         v1::Job* response) override;
  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                      v1::Job* response) override;
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override;
  grpc::Status CloseJob(grpc::ServerContext*, const v1::CloseJobRequest* request,
                        v1::CloseJobResponse* response) override;
  grpc::Status AttachWorker(grpc::ServerContext*, const v1::AttachWorkerRequest* request,
                            v1::AttachWorkerResponse* response) override;
  grpc::Status AbortStep(grpc::ServerContext*, const v1::AbortStepRequest* request,
                         v1::AbortStepResponse* response) override;
  grpc::Status UpdateGroup(grpc::ServerContext*, const v1::UpdateGroupRequest* request,
                           v1::ParamGroup* response) override;
  // Holds its thread until the steps are committed: an hour at most, and with a deadline nine
  // tenths of the time that is given, so that what there is still comes.
  grpc::Status TraceJob(grpc::ServerContext*, const v1::TraceJobRequest* request,
                        grpc::ServerWriter<v1::TraceJobResponse>* writer) override;

 private:
  Engine& engine_;
  SharedMemoryServer* const shared_memory_server_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_JOB_SERVICE_H_
