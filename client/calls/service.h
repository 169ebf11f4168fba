// Calls to a service without a session, for the tool and for C: one at a time, with error messages
// for people.
#ifndef BALLAST_CLIENT_CALLS_SERVICE_H_
#define BALLAST_CLIENT_CALLS_SERVICE_H_

#include <google/protobuf/message.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "ballast/v1/diagnostics.pb.h"
#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/state.pb.h"
#include "client/calls/member_reads.h"
#include "client/credentials.h"
#include "client/transport/clock.h"
#include "client/transport/connection.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client {

class Service {
 public:
  // Read-only calls are retried for up to `wait` while the service is unreachable: its process may
  // be restarting, or certificates may be changing.
  Service(std::string address, std::shared_ptr<grpc::Channel> channel, Credentials credentials,
          absl::Duration timeout, absl::Duration wait, Clock& clock = Clock::Real());
  // `services`: an address; of several, the first, which is rank 0's home and leads the job. Of a
  // cluster ("etcd://HOST:PORT/PREFIX") each call goes to the job's lead, a list of jobs is of all
  // services, and what is of no job goes to any. INVALID_ARGUMENT: an address, a certificate or a token
  // is wrong.
  static absl::StatusOr<std::unique_ptr<Service>> To(const std::string& services,
                                                     const Credentials& credentials,
                                                     absl::Duration timeout, absl::Duration wait);

  // Whether a call may be repeated: as the protocol says (NO_SIDE_EFFECTS), or as the caller knows
  // for this request.
  enum class Repeat : uint8_t { kAsTheProtocolSays, kYes };
  // A unary call: Call("JobService/GetJob", request, response). A list returns all pages. If a job,
  // a group or a parameter is not found, the error has similar names. What only the lead of a job's
  // members does is called there; a summary is put together from all members.
  absl::Status Call(const std::string& method, const google::protobuf::Message& request,
                    google::protobuf::Message& response,
                    Repeat repeat = Repeat::kAsTheProtocolSays);
  template <typename Response>
  absl::StatusOr<Response> Call(const std::string& method, const google::protobuf::Message& request,
                                Repeat repeat = Repeat::kAsTheProtocolSays) {
    Response response;
    BALLAST_RETURN_IF_ERROR(Call(method, request, response, repeat));
    return response;
  }
  // The same in JSON (proto/message_json.h). UNIMPLEMENTED: no unary call has this name.
  absl::StatusOr<std::string> CallJson(const std::string& method, absl::string_view request);

  absl::StatusOr<v1::Job> GetJob(const std::string& job, bool with_parameters);
  // The same; of a job with several members with the ranks of all, and what its lead knows of them.
  absl::StatusOr<v1::Job> GetJobOfAll(const std::string& job);
  // Calls `begin`, and `receive` for each part of a plane, in order; its first error ends the call.
  // If the service goes away and comes back within `wait` of the call's begin, everything is
  // repeated.
  absl::Status ReadState(const v1::ReadStateRequest& request, const std::function<void()>& begin,
                         const std::function<absl::Status(const v1::ReadStateResponse&)>& receive);
  // Sends what `next` returns, until that is empty or an error, which ends the call. Never
  // repeated: training may have continued from the written state.
  absl::StatusOr<v1::WriteStateResponse> WriteState(
      const v1::OpenWriteState& open, const std::function<absl::StatusOr<std::string>()>& next);
  // Calls `receive` for each part of a trace, in order; its first error ends the call.
  absl::Status ReadTrace(const v1::TraceJobRequest& request,
                         const std::function<absl::Status(const v1::TraceJobResponse&)>& receive);

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const std::string& address() const { return address_; }
  const std::string& cluster() const { return cluster_; }  // Its address; empty: none.
  // To another service, with the same credentials and limits.
  absl::StatusOr<std::unique_ptr<Service>> Other(const std::string& address) const;

 private:
  // In a cluster: from now on calls go to the service that leads the job.
  absl::Status GoTo(const std::string& job);
  absl::Status UseAddress(const std::string& address);
  absl::Status ListJobsOfCluster(v1::ListJobsResponse& response);
  absl::Status CallHere(const std::string& method, const google::protobuf::Message& request,
                        google::protobuf::Message& response, Repeat repeat);
  absl::Status CallLead(const std::string& method, const google::protobuf::Message& request,
                        google::protobuf::Message& response, Repeat repeat);
  // From the job's members.
  absl::StatusOr<MemberReads> ReadsOf(const v1::Job& job) const;
  // Before a call: UNAVAILABLE if the peer is silent.
  absl::Status Connect();
  absl::Status CallOnce(const std::string& path, const google::protobuf::Message& request,
                        google::protobuf::Message& response);
  // The error, with names similar to the missing one.
  absl::Status Suggest(const absl::Status& status, const std::string& name);
  void SetDeadline(grpc::ClientContext& context) const;
  absl::Status Explain(const grpc::Status& status);
  absl::Status WhileItMayHeal(const std::function<absl::Status()>& call);
  template <typename Response>
  absl::Status ReadAll(grpc::ClientContext& context, grpc::ClientReader<Response>& reader,
                       const std::function<absl::Status(const Response&)>& receive);

  std::string cluster_;  // Its address; empty: none.
  std::string address_;
  std::optional<Connection> connection_;
  std::shared_ptr<grpc::Channel> channel_;  // The connection's.
  const Credentials credentials_;
  const absl::Duration timeout_;
  const absl::Duration wait_;
  Clock& clock_;
  std::string untrusted_;  // Why the last call's TLS check failed, on either side.
  absl::Time untrusted_since_;
  bool untrusted_may_pass_ = false;
  bool answered_ = false;  // A call was answered, so the service exists.
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_CALLS_SERVICE_H_
