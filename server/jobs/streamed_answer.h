// A call whose answer is a stream of messages. Each message is made when the peer has taken the one
// before.
#ifndef BALLAST_SERVER_JOBS_STREAMED_ANSWER_H_
#define BALLAST_SERVER_JOBS_STREAMED_ANSWER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>

#include "absl/status/status.h"
#include "proto/frame.h"
#include "proto/status.h"
#include "server/call_errors.h"
#include "server/call_pool.h"
#include "server/find_job.h"
#include "server/pending_call.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. One message is in memory at a time, and a
// reader that does not read holds no thread. A subclass calls either Begin or End, once.
template <typename Message>
class StreamedAnswer : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  // Messages are made in the pool of readers. The pools outlive the call.
  StreamedAnswer(CallPools& pools, grpc::CallbackServerContext& context)
      : pool_(pools.readers),
        watched_(
            pools.watch.Watch([&context] { context.TryCancel(); }, WatchedCall::kAnswerSeconds)) {}

  void OnWriteDone(bool ok) final {
    watched_->PeerActed();
    if (!ok) return End(GoneError("reader"));
    Begin();
  }
  void OnCancel() final { pending_->Cancel(); }
  // Not on gRPC's thread: a subclass may have the last reference to a job.
  void OnDone() final {
    watched_->Ended();
    pool_.Run([self = std::shared_ptr<StreamedAnswer>(this)] {});
  }

 protected:
  // Fills an empty message with the next part of the answer; false at the end.
  virtual bool Fill(Message& message) = 0;

  // Sends the messages, and ends the call with OK after the last one.
  void Begin() {
    pool_.Run([this] { MakeNext(); });
  }
  void End(const absl::Status& status) { Finish(proto::ToGrpc(status)); }

  // Kept by code that may end the call before it has returned.
  std::shared_ptr<PendingCall> pending() const { return pending_; }
  void Keep(CallPool::Place place) { place_ = std::move(place); }
  // Cancels the call once the job is closed, so that it does not keep the job's memory, and once
  // the caller may not look at it any more.
  void EndsWith(const Engine& engine, const Caller& caller, const Job& job) {
    watched_->IsOverIf(IsGone(engine, caller, job));
  }

 private:
  void MakeNext() {
    Message message;
    if (!Fill(message)) return End(absl::OkStatus());
    bytes_ = proto::SerializeControl(message);
    watched_->PeerMustAct();
    StartWrite(&bytes_);
  }

  CallPool& pool_;
  const std::shared_ptr<WatchedCall> watched_;
  CallPool::Place place_;
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
  grpc::ByteBuffer bytes_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_STREAMED_ANSWER_H_
