// A call with one answer, worked on away from gRPC's threads. Its request comes as bytes, and is
// parsed in the pool, once the caller is admitted.
//
//   return UnaryCall::Run<v1::GetJobRequest>(
//       access.Admit(...), pools.control, {context, request, response},
//       [this](const Caller& caller, const v1::GetJobRequest& request) -> absl::StatusOr<v1::Job> {
//         return Get(caller, request);
//       });
//
//   return UnaryCall::Start<v1::AbortStepRequest>(
//       access.Admit(...), pools.control, {context, request, response},
//       [](UnaryCall& call, const v1::AbortStepRequest& request) {
//         call.Await<uint64_t>([&](Done<uint64_t> done) { return job->AbortStep(std::move(done)); },
//                              [](uint64_t step) -> absl::StatusOr<v1::AbortStepResponse> { ... });
//       });
#ifndef BALLAST_SERVER_JOBS_UNARY_CALL_H_
#define BALLAST_SERVER_JOBS_UNARY_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/pending.h"
#include "proto/frame.h"
#include "server/access/access.h"
#include "server/call_guard.h"
#include "server/call_pool.h"
#include "server/pending_call.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. gRPC keeps the bytes of the request and of
// the answer until then. Each call is ended exactly once.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // What gRPC gives for a call.
  struct Wire {
    grpc::CallbackServerContext* context;
    const grpc::ByteBuffer* request;
    grpc::ByteBuffer* answer;
  };

  // Runs `work` in the pool and ends the call with what it returns, an answer or an error; at once
  // if it is not admitted.
  template <typename Request, typename Work>
  static UnaryCall* Run(absl::StatusOr<Caller> caller, CallPool& pool, Wire wire, Work work) {
    return Start<Request>(std::move(caller), pool, wire,
                          [work = std::move(work)](UnaryCall& call, const Request& request) {
                            call.EndWith(Guarded([&] { return work(call.caller(), request); }));
                          });
  }
  // Runs `work` in the pool; it ends the call, now or later, with End or Await.
  template <typename Request, typename Work>
  static UnaryCall* Start(absl::StatusOr<Caller> caller, CallPool& pool, Wire wire, Work work) {
    return StartRaw(std::move(caller), pool, wire, [wire, work = std::move(work)](UnaryCall& call) {
      absl::StatusOr<Request> request = proto::ParseRequest<Request>(*wire.request);
      if (!request.ok()) return call.End(request.status());
      call.caller_->Asks(*request);
      work(call, *request);
    });
  }
  // For a request that `work` parses itself.
  static UnaryCall* StartRaw(absl::StatusOr<Caller> caller, CallPool& pool, Wire wire,
                             std::function<void(UnaryCall&)> work);

  // For `work`. What that throws for want of memory, it throws before it has ended the call.
  const Caller& caller() const { return *caller_; }
  // The call may be gone when it returns. Logs what an operator has changed.
  void End(const absl::Status& status);

  // Starts a call of the engine that may wait: `start` takes its Done and returns its Pending,
  // which is cancelled if the RPC is. Ends with its error, or with what `then` returns for its
  // result, an answer or an error; `then` runs in the pool, because the Done must not delay the
  // engine's thread.
  template <typename T, typename Starter, typename Then>
  void Await(Starter&& start, Then then) {
    PendingCall::Start<T>(pending_, std::forward<Starter>(start),
                          Done<T>([this, then = std::move(then)](absl::StatusOr<T> result) mutable {
                            if (!result.ok()) return End(result.status());
                            const absl::Status queued = GuardedRun([&] {
                              // A task is copied, which a result need not allow.
                              const auto kept = std::make_shared<T>(*std::move(result));
                              pool_.Run([this, kept, then = std::move(then)] {
                                EndWith(Guarded([&] { return then(*kept); }));
                              });
                            });
                            if (!queued.ok()) End(queued);
                          }));
  }

  void OnCancel() override { pending_->Cancel(); }
  void OnDone() override {
    watched_->Ended();
    pool_.AnswerIsOver(unread_bytes_);
    delete this;
  }

 private:
  UnaryCall(CallPool& pool, Wire wire)
      : pool_(pool),
        wire_(wire),
        watched_(pool.watch().Watch([context = wire.context] { context->TryCancel(); },
                                    WatchedCall::kAnswerSeconds)) {}
  template <typename Answer>
  void EndWith(const absl::StatusOr<Answer>& answer) {
    End(answer.ok() ? GuardedRun([&] { *wire_.answer = proto::SerializeControl(*answer); })
                    : answer.status());
  }
  // In the pool.
  void Work(const std::function<void(UnaryCall&)>& work);

  CallPool& pool_;
  const Wire wire_;
  const std::shared_ptr<WatchedCall> watched_;
  std::optional<Caller> caller_;  // None: it is not admitted.
  CallPool::Place place_;
  size_t unread_bytes_ = 0;  // Of the answer, if it waits without the place.
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_UNARY_CALL_H_
