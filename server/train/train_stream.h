// One rank's Train stream: reads its messages, one at a time, and feeds them to the engine.
#ifndef BALLAST_SERVER_TRAIN_TRAIN_STREAM_H_
#define BALLAST_SERVER_TRAIN_TRAIN_STREAM_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>

#include "cpu_optimizer_service/engine.h"
#include "proto/frame.h"
#include "server/train/rank_outbox.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. Messages are verified and added on the
// thread that gRPC brings them on.
class TrainStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                          private RankWire {
 public:
  // The engine outlives it.
  explicit TrainStream(const Engine& engine);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override { outbox_->WriteDone(ok); }
  void OnCancel() override { outbox_->Cancelled(); }
  void OnDone() override;

 private:
  void Read() override { StartRead(&read_buffer_); }
  void Write(const grpc::ByteBuffer& bytes) override { StartWrite(&bytes); }
  void Finish(const absl::Status& status) override;

  absl::Status Handle(const proto::Frame<v1::TrainRequest>& frame);
  absl::Status Open(const v1::OpenTrain& request);
  absl::Status BeginStep(const v1::BeginStep& request);
  absl::Status Contribute(const v1::GradientHeader& header, const proto::Payload& payload);
  absl::Status Contribute(const v1::SharedGradients& request);
  absl::Status EndMicroStep(const v1::EndMicroStep& request);
  absl::Status Seal(const v1::Seal& request);

  const Engine& engine_;
  const std::shared_ptr<RankOutbox> outbox_;
  grpc::ByteBuffer read_buffer_;
  // Touched only while a message is handled, and by OnDone.
  std::unique_ptr<RankStream> rank_stream_;
  size_t rank_chunks_ = 0;  // Of its partition.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_TRAIN_STREAM_H_
