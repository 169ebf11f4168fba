// A call whose answer is a stream of messages, each made when the one before has been taken.
#ifndef BALLAST_SERVER_JOBS_STREAMED_ANSWER_H_
#define BALLAST_SERVER_JOBS_STREAMED_ANSWER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>

#include "absl/status/status.h"
#include "proto/frame.h"
#include "server/call_guard.h"
#include "server/call_pool.h"
#include "server/find_job.h"
#include "server/pending_call.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. One message is in memory at a time, and a
// reader that takes none costs no thread. A subclass calls either Begin or End, once.
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
  // Not on gRPC's thread: what a subclass keeps may be the last of a job.
  void OnDone() final {
    watched_->Ended();
    // Without memory to go there, here.
    (void)RunsInMemory([&] { pool_.Run([self = std::shared_ptr<StreamedAnswer>(this)] {}); });
  }

 protected:
  // Fills an empty message with the next part of the answer; false at the end.
  virtual bool Fill(Message& message) = 0;

  // Sends the messages, and ends the call with OK after the last one.
  void Begin() {
    const absl::Status queued = GuardedRun([&] { pool_.Run([this] { MakeNext(); }); });
    if (!queued.ok()) End(queued);
  }
  void End(const absl::Status& status) { Finish(EndOf(status)); }

  // Kept by what may end the call before it has returned.
  std::shared_ptr<PendingCall> pending() const { return pending_; }
  void Keep(CallPool::Place place) { place_ = std::move(place); }
  // Once the job is closed the call is cancelled, so that it does not keep its memory; and once the
  // caller may not look at it any more.
  void EndsWith(const Engine& engine, const Caller& caller, const Job& job) {
    watched_->IsOverIf(IsGone(engine, caller, job));
  }

 private:
  void MakeNext() {
    bool more = false;
    const absl::Status made = GuardedRun([&] {
      Message message;
      more = Fill(message);
      if (more) bytes_ = proto::SerializeControl(message);
    });
    if (!made.ok() || !more) return End(made);
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
