// One WriteState call: a plane of one parameter, by an operator.
#ifndef BALLAST_SERVER_JOBS_STATE_WRITER_H_
#define BALLAST_SERVER_JOBS_STATE_WRITER_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/v1/state.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/access/access.h"
#include "server/call_pool.h"
#include "server/find_job.h"
#include "server/pending_call.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. The job gets the values only at its end.
class StateWriter final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  // The engine and the pools outlive it; gRPC keeps `response` until OnDone.
  StateWriter(const Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
              const absl::StatusOr<Caller>& caller, grpc::ByteBuffer& response);

  void OnReadDone(bool ok) override;
  void OnCancel() override { pending_->Cancel(); }
  void OnDone() override;

 private:
  void End(const absl::Status& status);
  absl::Status Handle(const v1::WriteStateRequest& request);
  absl::Status Open(const v1::OpenWriteState& request);
  absl::Status Write(const std::string& data);
  void Commit();

  const Engine& engine_;
  CallPools& pools_;
  absl::StatusOr<Caller> caller_;
  grpc::ByteBuffer& response_;
  CallPool::Place place_;
  const std::shared_ptr<WatchedCall> watched_;
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
  grpc::ByteBuffer read_buffer_;
  FoundParameter parameter_;  // Empty before the first message.
  std::shared_ptr<StateWriting> writing_;
  int64_t offset_ = 0;  // The next element's.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_STATE_WRITER_H_
