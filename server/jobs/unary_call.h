// A call with one answer, worked on away from gRPC's threads.
//
//   return UnaryCall::Run(pools.creation, [=, this] { return Create(*request, *response); });
//
//   return UnaryCall::Start(pools.control, [=, this](UnaryCall& call) {
//     call.Await<uint64_t>([&](Done<uint64_t> done) { return job->AbortStep(std::move(done)); },
//                          [=](uint64_t step) { ...; return absl::OkStatus(); });
//   });
#ifndef BALLAST_SERVER_JOBS_UNARY_CALL_H_
#define BALLAST_SERVER_JOBS_UNARY_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/pending.h"
#include "server/call_pool.h"
#include "server/pending_call.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. gRPC keeps the request and the response
// until then. Each call is ended exactly once.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // Runs `work` in the pool and ends the call with its status.
  static UnaryCall* Run(CallPool& pool, std::function<absl::Status()> work);
  // Runs `work` in the pool; it ends the call, now or later, with End or Await.
  static UnaryCall* Start(CallPool& pool, std::function<void(UnaryCall&)> work);

  // The call may be gone when it returns.
  void End(const absl::Status& status);

  // Starts a call of the engine that may wait: `start` takes its Done and returns its Pending,
  // which is cancelled if the RPC is. Ends with its error, or with what `then` returns for its
  // result; `then` runs in the pool, because the Done must not delay the engine's thread.
  template <typename T, typename Starter, typename Then>
  void Await(Starter&& start, Then then) {
    const std::shared_ptr<PendingCall> pending = pending_;  // The Done may end this call.
    pending->Await(start(Done<T>([this, then = std::move(then)](absl::StatusOr<T> result) mutable {
      if (!result.ok()) return End(result.status());
      // A task is copied, which a result need not allow.
      const auto kept = std::make_shared<T>(*std::move(result));
      pool_.Run([this, kept, then = std::move(then)] { End(then(*kept)); });
    })));
  }

  void OnCancel() override { pending_->Cancel(); }
  void OnDone() override { delete this; }

 private:
  explicit UnaryCall(CallPool& pool) : pool_(pool) {}

  CallPool& pool_;
  CallPool::Place place_;
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_UNARY_CALL_H_
