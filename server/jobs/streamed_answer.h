// A call whose answer is a stream of messages, each made when the one before has been taken.
#ifndef BALLAST_SERVER_JOBS_STREAMED_ANSWER_H_
#define BALLAST_SERVER_JOBS_STREAMED_ANSWER_H_

#include <grpcpp/support/server_callback.h>

#include <memory>

#include "absl/status/status.h"
#include "proto/status.h"
#include "server/call_pool.h"
#include "server/pending_call.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. One message is in memory at a time, and a
// reader that takes none costs no thread. A subclass calls either Begin or End, once.
template <typename Message>
class StreamedAnswer : public grpc::ServerWriteReactor<Message> {
 public:
  // Messages are made in `pool`, which outlives the call.
  explicit StreamedAnswer(CallPool& pool) : pool_(pool) {}

  void OnWriteDone(bool ok) final {
    if (!ok) return End(absl::CancelledError("the reader is gone"));
    Begin();
  }
  void OnCancel() final { pending_->Cancel(); }
  // Not on gRPC's thread: what a subclass keeps may be the last of a job.
  void OnDone() final {
    pool_.Run([self = std::shared_ptr<StreamedAnswer>(this)] {});
  }

 protected:
  // Fills an empty message with the next part of the answer; false at the end.
  virtual bool Fill(Message& message) = 0;

  // Sends the messages, and ends the call with OK after the last one.
  void Begin() {
    pool_.Run([this] {
      message_.Clear();
      if (!Fill(message_)) return End(absl::OkStatus());
      this->StartWrite(&message_);
    });
  }
  void End(const absl::Status& status) { this->Finish(proto::ToGrpc(status)); }

  // Kept by what may end the call before it has returned.
  std::shared_ptr<PendingCall> pending() const { return pending_; }
  void Keep(CallPool::Place place) { place_ = std::move(place); }

 private:
  CallPool& pool_;
  CallPool::Place place_;
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
  Message message_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_STREAMED_ANSWER_H_
