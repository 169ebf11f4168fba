// The service that the CLI calls: one call at a time, with error messages for people.
#ifndef BALLAST_CLIENT_CLI_CLI_SERVICE_H_
#define BALLAST_CLIENT_CLI_CLI_SERVICE_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/v1/ballast.grpc.pb.h"
#include "client/credentials.h"
#include "client/session/retry.h"
#include "client/transport/clock.h"
#include "client/transport/connection.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client::cli {

class Service {
 public:
  // Calls that change nothing are made again, for as long as `wait`, while no service can be
  // reached: its process may be about to be started again, or certificates to be changed.
  Service(std::string address, std::shared_ptr<grpc::Channel> channel, Credentials credentials,
          absl::Duration timeout, absl::Duration wait, Clock& clock = Clock::Real());

  // A unary call: Call(service.jobs(), &v1::JobService::Stub::GetJob, request).
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(Stub& stub,
                                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const Request& request) {
    BALLAST_RETURN_IF_ERROR(Connect());
    grpc::ClientContext context;
    SetDeadline(context);
    Response response;
    const grpc::Status status = (stub.*method)(&context, request, &response);
    if (status.ok() || !status.error_details().empty()) answered_ = true;
    if (!status.ok()) return Explain(status);
    return response;
  }

  // The same for one that may be made twice.
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Read(Stub& stub,
                                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const Request& request) {
    absl::StatusOr<Response> response = Response();
    const auto call = [&] {
      response = Call(stub, method, request);
      return response.status();
    };
    Retry(clock_, wait_, call, [this](const absl::Status& status) {
      return MayHeal(status);
    }).IgnoreError();  // It is in the response.
    return response;
  }

  // These with all of their pages.
  absl::StatusOr<v1::ListJobsResponse> ListJobs();
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(v1::ListCheckpointsRequest request);
  absl::StatusOr<v1::Job> GetJob(const std::string& job, bool with_parameters);
  // Calls `begin`, and `receive` for each part of a plane, in order; its first error ends the call.
  // All of it again where the service goes away and comes back within --wait of the call's begin.
  absl::Status ReadState(const v1::ReadStateRequest& request, const std::function<void()>& begin,
                         const std::function<absl::Status(const v1::ReadStateResponse&)>& receive);
  // Sends what `next` returns, until that is empty or an error, which ends the call. Not again: what
  // was written before may have been trained on since.
  absl::StatusOr<v1::WriteStateResponse> WriteState(
      const v1::OpenWriteState& open, const std::function<absl::StatusOr<std::string>()>& next);
  // Calls `receive` for each part of a trace, in order; its first error ends the call.
  absl::Status ReadTrace(const v1::TraceJobRequest& request,
                         const std::function<absl::Status(const v1::TraceJobResponse&)>& receive);
  // The error. If it is NOT_FOUND and there is no such job, it names jobs with similar names.
  absl::Status SuggestJob(const absl::Status& status, const std::string& job);

  // They stay where they are, and use the connection of the last Connect.
  v1::JobService::Stub& jobs() { return *jobs_; }
  v1::StateService::Stub& state() { return *state_; }
  // Before a call: UNAVAILABLE if what listens there says nothing.
  absl::Status Connect();
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const std::string& address() const { return address_; }

 private:
  void SetDeadline(grpc::ClientContext& context) const;
  absl::Status Explain(const grpc::Status& status);
  bool MayHeal(const absl::Status& status) const;
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> ReadPages(Stub& stub,
                                     grpc::Status (Stub::*method)(grpc::ClientContext*,
                                                                  const Request&, Response*),
                                     Request request);
  template <typename Response>
  absl::Status ReadAll(grpc::ClientContext& context, grpc::ClientReader<Response>& reader,
                       const std::function<absl::Status(const Response&)>& receive);

  const std::string address_;
  Connection connection_;
  std::shared_ptr<grpc::Channel> channel_;  // The connection's, which the stubs use.
  const Credentials credentials_;
  const absl::Duration timeout_;
  const absl::Duration wait_;
  Clock& clock_;
  std::string untrusted_;  // Why the last call did not trust what answers, or was not trusted.
  absl::Time untrusted_since_;
  bool untrusted_may_pass_ = false;
  bool answered_ = false;  // A call, so there is a service.
  std::optional<v1::JobService::Stub> jobs_;
  std::optional<v1::StateService::Stub> state_;
};

// The last part of a resource name: J of "jobs/J", G of "jobs/J/groups/G".
std::string BareName(const std::string& resource_name);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_SERVICE_H_
