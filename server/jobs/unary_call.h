// A call with one answer, worked on away from gRPC's threads.
//
//   return UnaryCall::Run(access.Admit(...), pools.creation, [=, this](const Caller& caller) {
//     return Create(caller, *request, *response);
//   });
//
//   return UnaryCall::Start(access.Admit(...), pools.control, [=, this](UnaryCall& call) {
//     call.Await<uint64_t>([&](Done<uint64_t> done) { return job->AbortStep(std::move(done)); },
//                          [=](uint64_t step) { ...; return absl::OkStatus(); });
//   });
#ifndef BALLAST_SERVER_JOBS_UNARY_CALL_H_
#define BALLAST_SERVER_JOBS_UNARY_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/pending.h"
#include "server/access/access.h"
#include "server/call_guard.h"
#include "server/call_pool.h"
#include "server/pending_call.h"

namespace ballast::server {

// Owns itself: gRPC calls OnDone last, which deletes it. gRPC keeps the request and the response
// until then. Each call is ended exactly once.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // Runs `work` in the pool and ends the call with its status; at once if it is not admitted.
  static UnaryCall* Run(absl::StatusOr<Caller> caller, CallPool& pool,
                        std::function<absl::Status(const Caller&)> work);
  // Runs `work` in the pool; it ends the call, now or later, with End or Await.
  static UnaryCall* Start(absl::StatusOr<Caller> caller, CallPool& pool,
                          std::function<void(UnaryCall&)> work);

  // For `work`. What that throws for want of memory, it throws before it has ended the call.
  const Caller& caller() const { return *caller_; }
  // The call may be gone when it returns. Logs what an operator has changed.
  void End(const absl::Status& status);

  // Starts a call of the engine that may wait: `start` takes its Done and returns its Pending,
  // which is cancelled if the RPC is. Ends with its error, or with what `then` returns for its
  // result; `then` runs in the pool, because the Done must not delay the engine's thread.
  template <typename T, typename Starter, typename Then>
  void Await(Starter&& start, Then then) {
    PendingCall::Start<T>(pending_, std::forward<Starter>(start),
                          Done<T>([this, then = std::move(then)](absl::StatusOr<T> result) mutable {
                            if (!result.ok()) return End(result.status());
                            const absl::Status queued = GuardedRun([&] {
                              // A task is copied, which a result need not allow.
                              const auto kept = std::make_shared<T>(*std::move(result));
                              pool_.Run([this, kept, then = std::move(then)] {
                                End(Guarded([&] { return then(*kept); }));
                              });
                            });
                            if (!queued.ok()) End(queued);
                          }));
  }

  void OnCancel() override { pending_->Cancel(); }
  void OnDone() override { delete this; }

 private:
  explicit UnaryCall(CallPool& pool) : pool_(pool) {}
  // In the pool.
  void Work(const std::function<void(UnaryCall&)>& work);

  CallPool& pool_;
  std::optional<Caller> caller_;  // None: it is not admitted.
  CallPool::Place place_;
  const std::shared_ptr<PendingCall> pending_ = std::make_shared<PendingCall>();
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_UNARY_CALL_H_
