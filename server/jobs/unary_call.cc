#include "server/jobs/unary_call.h"

#include "cpu_optimizer_service/common/status.h"
#include "server/call_guard.h"

namespace ballast::server {

UnaryCall* UnaryCall::Run(absl::StatusOr<Caller> caller, CallPool& pool,
                          std::function<absl::Status(const Caller&)> work) {
  return Start(std::move(caller), pool, [work = std::move(work)](UnaryCall& call) {
    call.End(Guarded([&] { return work(call.caller()); }));
  });
}

UnaryCall* UnaryCall::Start(absl::StatusOr<Caller> caller, CallPool& pool,
                            std::function<void(UnaryCall&)> work) {
  auto* const call = new UnaryCall(pool);
  const absl::Status started = Guarded([&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(caller.status());
    call->caller_ = *std::move(caller);
    BALLAST_ASSIGN_OR_RETURN(call->place_, pool.Enter());
    pool.Run([call, work = std::move(work)] { call->Work(work); });
    return absl::OkStatus();
  });
  if (!started.ok()) call->End(started);
  return call;
}

void UnaryCall::Work(const std::function<void(UnaryCall&)>& work) {
  // A call that was cancelled while it was queued changes nothing.
  if (pending_->cancelled()) return End(absl::CancelledError("the caller is gone"));
  const absl::Status worked = GuardedRun([&] { work(*this); });
  if (!worked.ok()) End(worked);
}

void UnaryCall::End(const absl::Status& status) {
  if (caller_.has_value()) (void)GuardedRun([&] { caller_->Audit(status); });
  Finish(EndOf(status));
}

}  // namespace ballast::server
