// One ReadState call: a plane of one parameter, piece after piece.
#ifndef BALLAST_SERVER_JOBS_STATE_READER_H_
#define BALLAST_SERVER_JOBS_STATE_READER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/v1/state.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/call_pool.h"
#include "server/find_job.h"
#include "server/jobs/streamed_answer.h"

namespace ballast::server {

// Reads from a snapshot, so training goes on, however slow the reader is.
class StateReader final : public StreamedAnswer<v1::ReadStateResponse> {
 public:
  // The engine and the pools outlive it.
  StateReader(const Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
              const absl::StatusOr<Caller>& caller, const grpc::ByteBuffer& request);

 private:
  absl::Status Start(const Engine& engine, CallPools& pools, const Caller& caller,
                     const grpc::ByteBuffer& request);
  void Opened(absl::StatusOr<Snapshot> snapshot);
  bool Fill(v1::ReadStateResponse& message) override;

  v1::ReadStateRequest request_;
  FoundParameter parameter_;
  Plane plane_ = Plane::kMaster;
  Snapshot snapshot_;
  bool begun_ = false;
  std::vector<ElementRange> ranges_;
  size_t next_range_ = 0;
  int64_t offset_ = 0;  // The next piece begins at this element of the parameter, or later.
  std::vector<float> piece_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_STATE_READER_H_
