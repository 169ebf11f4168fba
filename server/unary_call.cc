#include "server/unary_call.h"

#include "cpu_optimizer_service/common/status.h"
#include "proto/status.h"
#include "server/call_errors.h"

namespace ballast::server {

UnaryCall* UnaryCall::StartWork(absl::StatusOr<Caller> caller, CallPool& pool, Wire wire,
                                Work work) {
  auto* const call = new UnaryCall(pool, wire);
  const absl::Status started = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(caller.status());
    // Before the place, so that End can audit a call for which there is none.
    call->caller_ = *std::move(caller);
    BALLAST_ASSIGN_OR_RETURN(call->place_, pool.Enter());
    pool.Run([call, work = std::move(work)] {
      // A call that was cancelled while it was queued changes nothing.
      const absl::Status worked = call->pending_->cancelled() ? GoneError("caller") : work(*call);
      if (!worked.ok()) call->End(worked);
    });
    return absl::OkStatus();
  }();
  if (!started.ok()) call->End(started);
  return call;
}

void UnaryCall::End(const absl::Status& status) {
  if (caller_.has_value()) caller_->Audit(status);
  // Those who do not read would keep all others out.
  const size_t bytes = status.ok() ? wire_.answer->Length() : 0;
  if (pool_.AnswerWaits(bytes)) {
    unread_bytes_ = bytes;
    place_.reset();
  }
  // All that is done here comes before Finish, after which gRPC may delete the call.
  watched_->PeerMustAct();
  Finish(proto::ToGrpc(status));
}

}  // namespace ballast::server
