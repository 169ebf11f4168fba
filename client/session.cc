#include "client/session.h"

#include <utility>

#include "client/connect.h"
#include "client/session/session_impl.h"
#include "client/transport/clock.h"
#include "client/transport/grpc_transport.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"

namespace ballast::client {

absl::StatusOr<std::unique_ptr<Session>> Session::Open(std::shared_ptr<grpc::Channel> channel,
                                                       SessionOptions options) {
  KeepHeapWarm();  // Also for channels that Connect did not make, such as in-process ones.
  std::unique_ptr<Transport> transport =
      MakeGrpcTransport(std::move(channel), options.join_timeout);
  return SessionImpl::Open(std::move(transport), Clock::Real(), std::move(options));
}

}  // namespace ballast::client
