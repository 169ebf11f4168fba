// A call with one answer, worked on away from gRPC's threads. Its request comes as bytes, and is
// parsed in the pool, once the caller is admitted (raw_service.h).
//
//   absl::Status JobService::Abort(UnaryCall& call, const v1::AbortStepRequest& request) {
//     BALLAST_ASSIGN_OR_RETURN(const auto job, FindJob(engine_, call.caller(), request.name()));
//     return call.Await<uint64_t>(
//         [&](Done<uint64_t> done) { return job->AbortStep(std::move(done)); },
//         [](uint64_t step) -> absl::StatusOr<v1::AbortStepResponse> { ... });
//   }
#ifndef BALLAST_SERVER_UNARY_CALL_H_
#define BALLAST_SERVER_UNARY_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/pending.h"
#include "proto/frame.h"
#include "server/access/access.h"
#include "server/call_pool.h"
#include "server/pending_call.h"

namespace ballast::server {

// A page of a list is smaller than what clients accept that do not say how much they do, 4 MiB.
inline constexpr size_t kPageBytes = size_t{3} << 20;

// Owns itself: gRPC calls OnDone last, which deletes it. gRPC keeps the bytes of the request and of
// the answer until then. Each call is ended exactly once.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // gRPC's objects for a call.
  struct Wire {
    grpc::CallbackServerContext* context;
    const grpc::ByteBuffer* request;
    grpc::ByteBuffer* answer;
  };

  // Runs `work` in the pool and ends the call with its result, an answer or an error. If the caller
  // is not admitted, it ends the call at once.
  template <typename Request, typename Work>
  static UnaryCall* Run(absl::StatusOr<Caller> caller, CallPool& pool, Wire wire, Work work) {
    return Start<Request>(std::move(caller), pool, wire,
                          [work = std::move(work)](UnaryCall& call, const Request& request) {
                            call.EndWith(work(call.caller(), request));
                            return absl::OkStatus();
                          });
  }
  // Runs `work` in the pool. `work` ends the call, now or later, and returns OK; or it returns an
  // error, which ends the call. A request of bytes is passed unparsed.
  template <typename Request, typename Work>
  static UnaryCall* Start(absl::StatusOr<Caller> caller, CallPool& pool, Wire wire, Work work) {
    return StartWork(std::move(caller), pool, wire,
                     [wire, work = std::move(work)](UnaryCall& call) -> absl::Status {
                       if constexpr (std::is_same_v<Request, grpc::ByteBuffer>) {
                         return work(call, *wire.request);
                       } else {
                         BALLAST_ASSIGN_OR_RETURN(const Request request,
                                                  proto::ParseRequest<Request>(*wire.request));
                         call.caller_->Asks(request);
                         return work(call, request);
                       }
                     });
  }

  // For `work`.
  const Caller& caller() const { return *caller_; }

  // Starts a call of the engine that may wait. `start` takes its Done and returns its Pending,
  // which is cancelled with the RPC. The RPC ends with the error, or with what `then` returns for
  // the result: an answer or an error. `then` runs in the pool, because the Done must not delay the
  // engine's thread. The call may be gone when this returns, which is always OK.
  template <typename T, typename Starter, typename Then>
  absl::Status Await(Starter&& start, Then then) {
    const std::shared_ptr<PendingCall> pending = pending_;  // The Done may end the call.
    pending->Await(start(Done<T>([this, then = std::move(then)](absl::StatusOr<T> result) mutable {
      if (!result.ok()) return End(result.status());
      // A task is copied, but a result may not be copyable.
      const auto kept = std::make_shared<T>(*std::move(result));
      pool_.Run([this, kept, then = std::move(then)] { EndWith(then(*kept)); });
    })));
    return absl::OkStatus();
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
    if (answer.ok()) *wire_.answer = proto::SerializeControl(*answer);
    End(answer.status());
  }
  using Work = std::function<absl::Status(UnaryCall&)>;
  static UnaryCall* StartWork(absl::StatusOr<Caller> caller, CallPool& pool, Wire wire, Work work);
  // The call may be gone afterwards. Logs what an operator has changed.
  void End(const absl::Status& status);

  CallPool& pool_;
  const Wire wire_;
  const std::shared_ptr<WatchedCall> watched_;
  std::optional<Caller> caller_;  // Empty: not admitted.
  CallPool::Place place_;
  size_t unread_bytes_ = 0;  // The answer's, if it waits without the place.
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_UNARY_CALL_H_
