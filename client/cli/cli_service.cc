#include "client/cli/cli_service.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transport/handshake.h"
#include "cpu_optimizer_service/common/text/suggestions.h"
#include "proto/convert.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::client::cli {

Service::Service(std::string address, std::shared_ptr<grpc::Channel> channel,
                 Credentials credentials, absl::Duration timeout, absl::Duration wait, Clock& clock)
    : address_(std::move(address)),
      connection_(channel),
      channel_(std::move(channel)),
      credentials_(std::move(credentials)),
      timeout_(timeout),
      wait_(wait),
      clock_(clock) {
  jobs_.emplace(channel_);
  state_.emplace(channel_);
}

absl::Status Service::Connect() {
  constexpr absl::Duration kConnectLimit = absl::Seconds(20);
  untrusted_may_pass_ = false;
  const auto connected = connection_.Connected(std::min(timeout_, kConnectLimit));
  if (!connected.ok()) {
    return absl::UnavailableError(
        absl::StrCat("no service answers at ", address_, ": ", connected.status().message(),
                     "; see its log, or give the address with --service"));
  }
  if (*connected == channel_) return absl::OkStatus();
  channel_ = *connected;
  jobs_.emplace(channel_);
  state_.emplace(channel_);
  return absl::OkStatus();
}

void Service::SetDeadline(grpc::ClientContext& context) const {
  context.set_deadline(proto::Deadline(timeout_));
}

absl::Status Service::Explain(const grpc::Status& status) {
  const absl::Status error = proto::FromGrpc(status);
  untrusted_may_pass_ = false;
  if (absl::IsDeadlineExceeded(error)) {
    return absl::DeadlineExceededError(
        absl::StrCat("the service at ", address_, " did not answer within ",
                     absl::FormatDuration(timeout_), "; give it longer with --timeout"));
  }
  // A handshake that fails for a certificate looks like a service that is not there. It gets a
  // message of its own, which names the file to mend.
  const std::string why = WhyHandshakeFailed(status, address_, credentials_);
  const absl::Time now = clock_.Now();
  // While certificates are exchanged, the two sides have different ones for a moment, and it is
  // worth while to try again. A reason that stays for longer does not pass.
  if (why != untrusted_) untrusted_since_ = now;
  untrusted_ = why;
  untrusted_may_pass_ = !why.empty() && now - untrusted_since_ < kRotation;
  if (!why.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no service answers at ", address_, " that can be trusted: ", why));
  }
  // Where a service has answered before, advice to start one would mislead.
  if (const std::string cause = proto::CauseOfUnreachable(status); !cause.empty()) {
    return absl::UnavailableError(
        answered_ ? absl::StrCat("the connection to the service at ", address_,
                                 " broke before it had answered")
                  : absl::StrCat(
                        "no service answers at ", address_, ": ", cause,
                        "; start ballastd, or give its address with --service or BALLAST_SERVICE"));
  }
  // Errors of our services have details. This one is gRPC's: no such method is there.
  if (absl::IsUnimplemented(error) && status.error_details().empty()) {
    return absl::UnimplementedError(absl::StrCat("the service at ", address_,
                                                 " does not know this call; use a ballast of the "
                                                 "service's version"));
  }
  return error;
}

bool Service::MayHeal(const absl::Status& status) const {
  return absl::IsUnavailable(status) || untrusted_may_pass_;
}

absl::StatusOr<v1::Job> Service::GetJob(const std::string& job, bool with_parameters) {
  v1::GetJobRequest request;
  request.set_name(proto::JobName(job));
  request.set_with_parameters(with_parameters);
  absl::StatusOr<v1::Job> response = Read(*jobs_, &v1::JobService::Stub::GetJob, request);
  if (!response.ok()) return SuggestJob(response.status(), job);
  return response;
}

template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> Service::ReadPages(Stub& stub,
                                            grpc::Status (Stub::*method)(grpc::ClientContext*,
                                                                         const Request&, Response*),
                                            Request request) {
  Response all;
  std::set<std::string> tokens;
  do {
    absl::StatusOr<Response> page = Read(stub, method, request);
    if (!page.ok()) return page.status();
    request.set_page_token(page->next_page_token());
    // A token that comes a second time would make this loop endless.
    if (!request.page_token().empty() && !tokens.insert(request.page_token()).second) {
      return absl::InternalError("the service lists without an end; use the same versions");
    }
    // MergeFrom appends lists; of single numbers the last page's stay.
    all.MergeFrom(*page);
    all.clear_next_page_token();
  } while (!request.page_token().empty());
  return all;
}

absl::StatusOr<v1::ListJobsResponse> Service::ListJobs() {
  return ReadPages(*jobs_, &v1::JobService::Stub::ListJobs, v1::ListJobsRequest());
}

absl::StatusOr<v1::ListCheckpointsResponse> Service::ListCheckpoints(
    v1::ListCheckpointsRequest request) {
  return ReadPages(*state_, &v1::StateService::Stub::ListCheckpoints, std::move(request));
}

absl::Status Service::SuggestJob(const absl::Status& status, const std::string& job) {
  if (!absl::IsNotFound(status)) return status;
  const absl::StatusOr<v1::ListJobsResponse> response = ListJobs();
  // The list would only have made the message better, so the first error stands.
  if (!response.ok()) return status;
  std::vector<std::string> names;
  for (const v1::Job& there : response->jobs()) {
    names.push_back(BareName(there.name()));
    if (names.back() == job) return status;  // The job exists; something else is missing.
  }
  return absl::NotFoundError(
      absl::StrCat(status.message(), "; asked at ", address_, Suggestion(job, names)));
}

absl::Status Service::ReadState(
    const v1::ReadStateRequest& request, const std::function<void()>& begin,
    const std::function<absl::Status(const v1::ReadStateResponse&)>& receive) {
  return Retry(
      clock_, wait_,
      [&] {
        begin();
        BALLAST_RETURN_IF_ERROR(Connect());
        // gRPC allows a context for one call only.
        grpc::ClientContext context;
        SetDeadline(context);
        return ReadAll<v1::ReadStateResponse>(context, *state_->ReadState(&context, request),
                                              receive);
      },
      [&](const absl::Status& status) { return MayHeal(status); });
}

absl::StatusOr<v1::WriteStateResponse> Service::WriteState(
    const v1::OpenWriteState& open, const std::function<absl::StatusOr<std::string>()>& next) {
  BALLAST_RETURN_IF_ERROR(Connect());
  grpc::ClientContext context;
  SetDeadline(context);
  v1::WriteStateResponse response;
  const auto writer = state_->WriteState(&context, &response);
  v1::WriteStateRequest first;
  *first.mutable_open() = open;
  // If a write fails, the service has ended the call, and Finish returns its reason.
  for (bool goes_on = writer->Write(first); goes_on;) {
    absl::StatusOr<std::string> data = next();
    if (!data.ok()) {
      context.TryCancel();
      writer->Finish();
      return data.status();
    }
    if (data->empty()) break;
    v1::WriteStateRequest part;
    part.mutable_data()->set_values(*std::move(data));
    goes_on = writer->Write(part);
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  if (!status.ok()) return Explain(status);
  return response;
}

absl::Status Service::ReadTrace(
    const v1::TraceJobRequest& request,
    const std::function<absl::Status(const v1::TraceJobResponse&)>& receive) {
  // This is not tried again: a second call would trace other steps than those that were waited for.
  BALLAST_RETURN_IF_ERROR(Connect());
  grpc::ClientContext context;
  SetDeadline(context);
  return ReadAll(context, *jobs_->TraceJob(&context, request), receive);
}

template <typename Response>
absl::Status Service::ReadAll(grpc::ClientContext& context, grpc::ClientReader<Response>& reader,
                              const std::function<absl::Status(const Response&)>& receive) {
  Response part;
  while (reader.Read(&part)) {
    if (absl::Status status = receive(part); !status.ok()) {
      untrusted_may_pass_ = false;  // The error is the receiver's, and no more of the connection.
      // A stream has to be finished before it is destroyed. Its status is that of our own
      // cancelling, which says nothing.
      context.TryCancel();
      reader.Finish();
      return status;
    }
  }
  const grpc::Status status = reader.Finish();
  return status.ok() ? absl::OkStatus() : Explain(status);
}

std::string BareName(const std::string& resource_name) {
  if (const auto parameter = proto::ParseParameterName(resource_name); parameter.ok()) {
    return parameter->child;
  }
  if (const auto group = proto::ParseGroupName(resource_name); group.ok()) return group->child;
  if (const auto job = proto::ParseJobName(resource_name); job.ok()) return job->job;
  return resource_name;
}

}  // namespace ballast::client::cli
