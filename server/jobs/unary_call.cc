#include "server/jobs/unary_call.h"

#include "proto/status.h"

namespace ballast::server {

UnaryCall* UnaryCall::Run(CallPool& pool, std::function<absl::Status()> work) {
  return Start(pool, [work = std::move(work)](UnaryCall& call) { call.End(work()); });
}

UnaryCall* UnaryCall::Start(CallPool& pool, std::function<void(UnaryCall&)> work) {
  auto* const call = new UnaryCall(pool);
  absl::StatusOr<CallPool::Place> place = pool.Enter();
  if (!place.ok()) {
    call->End(place.status());
    return call;
  }
  call->place_ = *std::move(place);
  pool.Run([call, work = std::move(work)] {
    // A call that was cancelled while it was queued changes nothing.
    if (call->pending_->cancelled()) return call->End(absl::CancelledError("the caller is gone"));
    work(*call);
  });
  return call;
}

void UnaryCall::End(const absl::Status& status) { Finish(proto::ToGrpc(status)); }

}  // namespace ballast::server
