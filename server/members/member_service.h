// MemberService: links of the leads of jobs that this service has parts of.
#ifndef BALLAST_SERVER_MEMBERS_MEMBER_SERVICE_H_
#define BALLAST_SERVER_MEMBERS_MEMBER_SERVICE_H_

#include "ballast/v1/members.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/access/access.h"
#include "server/call_pool.h"
#include "server/raw_service.h"

namespace ballast::server {

class MemberService final : public RawService<v1::MemberService> {
 public:
  // All outlive it.
  MemberService(Engine& engine, const Access& access, CallPools& pools);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_MEMBERS_MEMBER_SERVICE_H_
