// JobService: creates, finds, joins, traces and closes jobs.
#ifndef BALLAST_SERVER_JOBS_JOB_SERVICE_H_
#define BALLAST_SERVER_JOBS_JOB_SERVICE_H_

#include <optional>
#include <string>
#include <utility>

#include "ballast/v1/jobs.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/call_pool.h"
#include "server/checkpoint_paths.h"
#include "server/cluster/registration.h"
#include "server/raw_service.h"
#include "server/shared_memory/shared_memory_server.h"

namespace ballast::server {

// Thread-safe. The engine, the access, the pools, the paths and the server of shared memory outlive
// its calls.
class JobService final : public RawService<v1::JobService> {
 public:
  // `shared_memory_server` is null if no memory is shared with workers.
  JobService(Engine& engine, const Access& access, CallPools& pools, const CheckpointPaths& paths,
             SharedMemoryServer* shared_memory_server);

  // Before any call: the address that clients are told for other services; "" for none.
  void IsReachedAt(std::string advertised) { advertised_ = std::move(advertised); }
  // Before any call: who keeps names of jobs in a cluster, and outlives calls; null: nobody.
  void UseRegistration(Registration* registration) { registration_ = registration; }

 private:
  absl::Status Create(UnaryCall& call, const grpc::ByteBuffer& bytes);
  // Also chooses spec.epoch. Empty: the cluster has no part in it.
  absl::StatusOr<std::optional<Registration::Claim>> TakeName(const Derivation& derivation,
                                                              JobSpec& spec) const;
  absl::StatusOr<v1::Job> Get(const Caller& caller, const v1::GetJobRequest& request) const;
  absl::StatusOr<v1::ListJobsResponse> List(const Caller& caller,
                                            const v1::ListJobsRequest& request) const;
  absl::Status Close(UnaryCall& call, const v1::CloseJobRequest& request);
  absl::Status Attach(UnaryCall& call, const grpc::ByteBuffer& bytes);
  absl::Status Abort(UnaryCall& call, const v1::AbortStepRequest& request);
  absl::Status Undo(UnaryCall& call, const v1::UndoStepRequest& request);
  absl::StatusOr<v1::ParamGroup> Update(const Caller& caller,
                                        const v1::UpdateGroupRequest& request) const;
  absl::StatusOr<v1::JobHistory> History(const Caller& caller,
                                         const v1::GetHistoryRequest& request) const;

  Engine& engine_;
  const CheckpointPaths& paths_;
  SharedMemoryServer* const shared_memory_server_;
  std::string advertised_;
  Registration* registration_ = nullptr;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_JOB_SERVICE_H_
