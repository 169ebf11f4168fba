// StateService: looks at optimizer state by name; saves and loads it.
#ifndef BALLAST_SERVER_JOBS_STATE_SERVICE_H_
#define BALLAST_SERVER_JOBS_STATE_SERVICE_H_

#include "ballast/v1/state.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/call_pool.h"
#include "server/checkpoint_paths.h"
#include "server/find_job.h"
#include "server/raw_service.h"

namespace ballast::server {

// The snapshot is of the parameter. Reads all of it that is here.
v1::StateSummary SummaryOf(const FoundParameter& parameter, const Snapshot& snapshot,
                           bool with_sums = false);

// Thread-safe. The engine, the access, the pools and the paths outlive its calls.
class StateService final : public RawService<v1::StateService> {
 public:
  StateService(Engine& engine, const Access& access, CallPools& pools,
               const CheckpointPaths& paths);

 private:
  absl::Status Summarize(UnaryCall& call, const v1::SummarizeStateRequest& request);
  absl::Status Save(UnaryCall& call, const v1::SaveJobRequest& request);
  absl::Status Load(UnaryCall& call, const v1::LoadJobRequest& request);
  absl::Status List(UnaryCall& call, const v1::ListCheckpointsRequest& request);
  absl::Status Verify(UnaryCall& call, const v1::VerifyCheckpointsRequest& request);
  absl::Status Delete(UnaryCall& call, const v1::DeleteCheckpointRequest& request);

  Engine& engine_;
  const CheckpointPaths& paths_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_STATE_SERVICE_H_
