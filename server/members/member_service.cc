#include "server/members/member_service.h"

#include "server/members/follow_call.h"

namespace ballast::server {

MemberService::MemberService(Engine& engine, const Access& access, CallPools& pools)
    : RawService(access) {
  Bidi("Follow", [&engine, &pools](grpc::CallbackServerContext& context,
                                   const absl::StatusOr<Caller>& caller) {
    return new FollowCall(engine, pools, context, caller);
  });
}

}  // namespace ballast::server
