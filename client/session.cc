#include "client/session.h"

#include <grpcpp/client_context.h>

#include <utility>

#include "ballast/v1/jobs.grpc.pb.h"
#include "ballast/v1/state.grpc.pb.h"
#include "client/connect.h"
#include "client/session/join.h"
#include "client/session/session_impl.h"
#include "client/transport/clock.h"
#include "client/transport/connection.h"
#include "client/transport/grpc_transport.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "proto/convert.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client {

absl::StatusOr<std::unique_ptr<Session>> Session::Open(std::shared_ptr<grpc::Channel> channel,
                                                       SessionOptions options) {
  KeepHeapWarm();  // Also for channels that Connect did not make, such as in-process ones.
  // Attaching is among the short calls, and takes longer with a large job.
  std::unique_ptr<Transport> transport =
      MakeGrpcTransport(std::move(channel), options.join_timeout + TimeForMemory(options.job));
  return SessionImpl::Open(std::move(transport), Clock::Real(), std::move(options));
}

absl::Status Session::CloseJob(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& job, const std::string& uid) {
  constexpr absl::Duration kLimit = absl::Minutes(5);  // Much memory takes long to be given back.
  Connection connection(channel);
  BALLAST_ASSIGN_OR_RETURN(const auto connected, connection.Connected(absl::Seconds(10)));
  grpc::ClientContext context;
  context.set_deadline(proto::Deadline(kLimit));
  v1::CloseJobRequest request;
  request.set_name(proto::JobName(job));
  request.set_uid(uid);
  v1::CloseJobResponse response;
  return proto::FromGrpc(v1::JobService::Stub(connected).CloseJob(&context, request, &response));
}

absl::Status Session::DeleteCheckpoint(const std::shared_ptr<grpc::Channel>& channel,
                                       const std::string& checkpoint, const std::string& uid) {
  constexpr absl::Duration kLimit = absl::Minutes(5);  // A disk may be slow.
  Connection connection(channel);
  BALLAST_ASSIGN_OR_RETURN(const auto connected, connection.Connected(absl::Seconds(10)));
  grpc::ClientContext context;
  context.set_deadline(proto::Deadline(kLimit));
  v1::DeleteCheckpointRequest request;
  request.set_directory(checkpoint);
  request.set_uid(uid);
  v1::DeleteCheckpointResponse response;
  return proto::FromGrpc(
      v1::StateService::Stub(connected).DeleteCheckpoint(&context, request, &response));
}

}  // namespace ballast::client
