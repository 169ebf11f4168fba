// One UploadWeights call: a rank's first weights, with or without moments, its part of a write of
// state, or what it has made of its directions.
#ifndef BALLAST_SERVER_TRAIN_UPLOAD_STREAM_H_
#define BALLAST_SERVER_TRAIN_UPLOAD_STREAM_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_set>

#include "cpu_optimizer_service/engine.h"
#include "proto/frame.h"
#include "server/access/access.h"
#include "server/call_pool.h"
#include "server/pending_call.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it.
class UploadStream final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  // The engine and the pools outlive it; gRPC keeps `response` until OnDone.
  UploadStream(const Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
               const absl::StatusOr<Caller>& caller, grpc::ByteBuffer& response);

  void OnReadDone(bool ok) override;
  void OnCancel() override { pending_->Cancel(); }
  void OnDone() override;

 private:
  // For the watch: ends a call that has not begun, and cancels one that ends too slowly.
  void GiveUp(grpc::CallbackServerContext& context);
  void End(const absl::Status& status);
  void EndWith(bool ready);  // Well.
  absl::Status Handle(const proto::Frame<v1::UploadWeightsRequest>& frame);
  absl::Status Open(const v1::OpenTrain& request);
  absl::Status BeginFirstWeights(const v1::OpenTrain& request, const RankHolder& holder, Job& job);
  absl::Status BeginStateWrite(const v1::StateWrite& request, const RankHolder& holder, Job& job);
  void EndStateWrite();
  absl::Status Write(const v1::WeightHeader& header, const proto::Payload& payload);

  const Engine& engine_;
  CallPools& pools_;
  const absl::StatusOr<Caller> caller_;
  grpc::ByteBuffer& response_;
  CallPool::Place place_;                // Once it is opened.
  std::atomic<bool> has_begun_ = false;  // Its first message has come, or the call has ended.
  const std::shared_ptr<WatchedCall> watched_;
  grpc::ByteBuffer read_buffer_;
  std::shared_ptr<Job> job_;  // Null before the first message.
  RankHolder holder_;
  uint64_t step_ = 0;           // The step of its weights.
  bool is_orthogonal_ = false;  // They are O.
  bool is_in_place_ = false;    // In shared memory.
  Job::Uploader uploader_;
  std::optional<Job::StateWriter> writer_;  // Absent: these are first weights.
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
  std::unordered_set<uint32_t> chunks_;  // Chunks that have arrived on this stream.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_UPLOAD_STREAM_H_
