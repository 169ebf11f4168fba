// One rank's Train stream: reads its messages, one at a time, and feeds them to the engine.
#ifndef BALLAST_SERVER_TRAIN_TRAIN_STREAM_H_
#define BALLAST_SERVER_TRAIN_TRAIN_STREAM_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/engine.h"
#include "proto/frame.h"
#include "server/access/access.h"
#include "server/call_pool.h"
#include "server/pending_call.h"
#include "server/train/rank_outbox.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. Messages are verified and added on gRPC's
// thread. Only opening, discarding, and gradients after one that may_guess may wait. They wait in
// the engine without a thread, and the next message is read after that.
class TrainStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                          private RankWire {
 public:
  // The engine and the pools outlive it.
  TrainStream(const Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
              const absl::StatusOr<Caller>& caller);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override { outbox_->WriteDone(ok); }
  void OnCancel() override;
  void OnDone() override;

 private:
  void Read() override { StartRead(&read_buffer_); }
  void Write(const grpc::ByteBuffer& bytes) override { StartWrite(&bytes); }
  void Finish(const absl::Status& status) override;
  // For the watch: ends a stream that has not begun, and cancels one that ends too slowly.
  void GiveUp(grpc::CallbackServerContext& context);

  // Handles the message that was read. Returns the number of messages that it counts as. Empty: it
  // is answered later, and the stream may be gone by then.
  absl::StatusOr<std::optional<uint64_t>> HandleRead();
  absl::Status Handle(const proto::Frame<v1::TrainRequest>& frame);
  absl::Status Open(const v1::OpenTrain& request);
  absl::Status Opened(int rank, absl::StatusOr<std::unique_ptr<RankStream>> stream);
  // The end of a message that was answered later, and counts as `messages`.
  void Answered(const absl::Status& status, uint64_t messages = 1);
  absl::Status BeginStep(const v1::BeginStep& request);
  absl::Status Contribute(const v1::GradientHeader& header, const proto::Payload& payload);
  absl::Status Contribute(const v1::SharedGradients& request);
  absl::Status Contribute(const Contribution& contribution);
  // Whether a running provisional update may conflict with this message's gradients.
  bool MayMeetProvisional(const v1::TrainRequest& message) const;
  // Waits for the end of such updates, then handles the message. May wait in the engine, as
  // opening.
  void StopProvisionalAndHandle(proto::Frame<v1::TrainRequest> frame);
  absl::Status EndMicroStep(const v1::EndMicroStep& request);
  // For a seal or a vote with a report.
  template <typename Message>
  absl::Status Report(const Message& message);
  absl::Status Seal(const v1::Seal& request);
  absl::Status Vote(const v1::CastVote& request);
  // May wait in the engine, as opening; the next message is read when it is done.
  void Discard(const v1::Discard& request);

  const Engine& engine_;
  CallPools& pools_;
  const absl::StatusOr<Caller> caller_;
  CallPool::Place place_;                // Once it is opened.
  std::atomic<bool> has_begun_ = false;  // Its first message has come, or the stream has ended.
  const std::shared_ptr<WatchedCall> watched_;
  const std::shared_ptr<RankOutbox> outbox_;
  grpc::ByteBuffer read_buffer_;
  // Opening, discarding, or stopping provisional updates.
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
  // Only used while a message is handled, and by OnDone.
  std::shared_ptr<Job> job_;  // Null before the first message.
  std::unique_ptr<RankStream> rank_stream_;
  size_t rank_chunks_ = 0;  // The number of chunks in the rank's partition.
  int first_of_rank_ = 0;   // Layout::first_of_rank of the rank.
  // The last attempt that may have a gradient with may_guess.
  std::optional<StepAttempt> may_guess_at_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_TRAIN_STREAM_H_
