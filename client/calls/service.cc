#include "client/calls/service.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/message.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/impl/rpc_method.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "ballast/v1/state.grpc.pb.h"
#include "client/calls/cluster_services.h"
#include "client/calls/member_reads.h"
#include "client/connect.h"
#include "client/session/retry.h"
#include "client/transport/handshake.h"
#include "cpu_optimizer_service/common/plan/homes.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/text/suggestions.h"
#include "proto/convert.h"
#include "proto/deadline.h"
#include "proto/message_json.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::MethodDescriptor;
using google::protobuf::MethodOptions;

// The field of this name; null: the message has none.
const FieldDescriptor* FieldOf(const Message& message, const std::string& name) {
  return message.GetDescriptor()->FindFieldByName(name);
}

std::string TextOf(const Message& message, const std::string& name) {
  const FieldDescriptor* field = FieldOf(message, name);
  return field == nullptr ? "" : message.GetReflection()->GetString(message, field);
}

constexpr char kListJobs[] = "JobService/ListJobs";

// Whose name it has; that of a folder of checkpoints, too. Empty: no job's.
std::string JobAskedFor(const Message& request) {
  const std::string name = TextOf(request, "name");
  if (!name.empty()) return proto::JobOf(name);
  const std::string folder = TextOf(request, "directory");
  return folder.substr(0, folder.find('/'));
}

absl::StatusOr<const MethodDescriptor*> FindMethod(const std::string& method) {
  const MethodDescriptor* found =
      google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(
          absl::StrCat("ballast.v1.", absl::StrReplaceAll(method, {{"/", "."}})));
  if (found != nullptr && !found->client_streaming() && !found->server_streaming()) return found;
  return absl::UnimplementedError(
      absl::StrCat("there is no unary call ", method, "; see proto/ballast/v1"));
}

std::unique_ptr<Message> New(const google::protobuf::Descriptor* type) {
  return std::unique_ptr<Message>(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(type)->New());
}

// Calls `call` for each page, and joins the pages into one list.
absl::Status CallAllPages(const std::function<absl::Status(const Message&, Message&)>& call,
                          const Message& request, Message& response) {
  const FieldDescriptor* next = FieldOf(response, "next_page_token");
  const FieldDescriptor* asks = FieldOf(request, "page_token");
  if (next == nullptr || asks == nullptr) return call(request, response);
  const std::unique_ptr<Message> asked(request.New());
  const std::unique_ptr<Message> page(response.New());
  asked->CopyFrom(request);
  std::set<std::string> tokens;
  std::string token;
  do {
    BALLAST_RETURN_IF_ERROR(call(*asked, *page));
    // MergeFrom appends lists; of single numbers the last page's stay.
    response.MergeFrom(*page);
    response.GetReflection()->ClearField(&response, next);
    token = TextOf(*page, "next_page_token");
    // A token that comes a second time would make this loop endless.
    if (!token.empty() && !tokens.insert(token).second) {
      return absl::InternalError("the service lists without an end; use the same versions");
    }
    asked->GetReflection()->SetString(asked.get(), asks, token);
  } while (!token.empty());
  return absl::OkStatus();
}

}  // namespace

Service::Service(std::string address, std::shared_ptr<grpc::Channel> channel,
                 Credentials credentials, absl::Duration timeout, absl::Duration wait, Clock& clock)
    : address_(std::move(address)),
      connection_(std::in_place, channel),
      channel_(std::move(channel)),
      credentials_(std::move(credentials)),
      timeout_(timeout),
      wait_(wait),
      clock_(clock) {}

absl::StatusOr<std::unique_ptr<Service>> Service::To(const std::string& services,
                                                     const Credentials& credentials,
                                                     absl::Duration timeout, absl::Duration wait) {
  // Bounded: an infinite timeout would overflow the clock.
  constexpr absl::Duration kMost = absl::Seconds(1'000'000'000);
  auto service = std::make_unique<Service>("", nullptr, credentials, std::min(timeout, kMost),
                                           std::min(wait, kMost));
  if (cluster::IsAddress(services)) {
    service->cluster_ = services;
    // What is wrong with files is found before the first call.
    BALLAST_RETURN_IF_ERROR(OpenCluster(services).status());
    return service;
  }
  BALLAST_ASSIGN_OR_RETURN(const std::vector<std::string> addresses, ParseServices(services));
  BALLAST_RETURN_IF_ERROR(CheckAddress(addresses.front()));
  BALLAST_RETURN_IF_ERROR(service->UseAddress(addresses.front()));
  return service;
}

absl::Status Service::UseAddress(const std::string& address) {
  if (address == address_) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(channel_, NewChannel(address, credentials_));
  connection_.emplace(channel_);
  address_ = address;
  answered_ = false;
  return absl::OkStatus();
}

absl::Status Service::GoTo(const std::string& job) {
  if (cluster_.empty()) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(const std::string lead, FindLead(cluster_, job));
  return UseAddress(lead);
}

absl::Status Service::ListJobsOfCluster(v1::ListJobsResponse& response) {
  BALLAST_ASSIGN_OR_RETURN(const auto cluster, OpenCluster(cluster_));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<cluster::Cluster::Service> services,
                           cluster->Services());
  std::map<std::string, v1::Job> jobs;  // By name and uid; as the lead has it, if that answers.
  for (const cluster::Cluster::Service& each : services) {
    const std::string& address = each.service.address();
    BALLAST_RETURN_IF_ERROR(UseAddress(address));
    v1::ListJobsResponse said;
    const absl::Status called =
        CallHere(kListJobs, v1::ListJobsRequest(), said, Repeat::kAsTheProtocolSays);
    if (!called.ok()) {
      response.add_problems(std::string(called.message()));
      continue;
    }
    response.set_memory_used_bytes(response.memory_used_bytes() + said.memory_used_bytes());
    response.set_memory_limit_bytes(response.memory_limit_bytes() + said.memory_limit_bytes());
    response.mutable_activities()->MergeFrom(said.activities());
    for (v1::Job& job : *said.mutable_jobs()) {
      const bool is_lead = job.homes().empty() || job.homes(0) == job.answering_member();
      v1::Job& known = jobs[absl::StrCat(job.name(), " ", job.uid())];
      if (known.name().empty() || is_lead) known.Swap(&job);
    }
  }
  for (auto& [name, job] : jobs) response.add_jobs()->Swap(&job);
  return absl::OkStatus();
}

absl::Status Service::Connect() {
  constexpr absl::Duration kConnectLimit = absl::Seconds(20);
  untrusted_may_pass_ = false;
  const auto connected = connection_->Connected(std::min(timeout_, kConnectLimit));
  if (!connected.ok()) {
    return absl::UnavailableError(
        absl::StrCat("no service answers at ", address_, ": ", connected.status().message(),
                     "; see its log, or give the address with --service"));
  }
  channel_ = *connected;
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
        absl::StrCat("no connection to the service at ", address_, ": ", why));
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

absl::Status Service::WhileItMayHeal(const std::function<absl::Status()>& call) {
  return Retry(clock_, wait_, call, [this](const absl::Status& status) {
    return absl::IsUnavailable(status) || untrusted_may_pass_;
  });
}

absl::Status Service::CallOnce(const std::string& path, const Message& request, Message& response) {
  BALLAST_RETURN_IF_ERROR(Connect());
  grpc::ClientContext context;
  SetDeadline(context);
  const grpc::internal::RpcMethod method(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
  // What generated stubs call, for messages whose types are known only here.
  const grpc::Status status =
      grpc::internal::BlockingUnaryCall<Message, Message, google::protobuf::MessageLite,
                                        google::protobuf::MessageLite>(
          channel_.get(), method, &context, request, &response);
  if (status.ok() || !status.error_details().empty()) answered_ = true;
  return status.ok() ? absl::OkStatus() : Explain(status);
}

absl::Status Service::CallHere(const std::string& method, const Message& request, Message& response,
                               Repeat repeat) {
  BALLAST_ASSIGN_OR_RETURN(const MethodDescriptor* found, FindMethod(method));
  const bool repeats = repeat == Repeat::kYes ||
                       found->options().idempotency_level() == MethodOptions::NO_SIDE_EFFECTS;
  const auto call = [&](const Message& asked, Message& answer) {
    const auto once = [&] { return CallOnce(absl::StrCat("/ballast.v1.", method), asked, answer); };
    return repeats ? WhileItMayHeal(once) : once();
  };
  return Suggest(CallAllPages(call, request, response), TextOf(request, "name"));
}

absl::Status Service::Call(const std::string& method, const Message& request, Message& response,
                           Repeat repeat) {
  if (!cluster_.empty() && method == kListJobs) {
    v1::ListJobsResponse listed;
    BALLAST_RETURN_IF_ERROR(ListJobsOfCluster(listed));
    response.CopyFrom(listed);
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(GoTo(JobAskedFor(request)));
  const absl::Status called = CallHere(method, request, response, repeat);
  if (ReasonOf(called) == reason::kOtherMemberLeads) {
    return CallLead(method, request, response, repeat);
  }
  // SummarizeState is the only unary call with this reason.
  if (ReasonOf(called) != reason::kOtherMembersHaveParts) return called;
  v1::SummarizeStateRequest asked;
  asked.CopyFrom(request);
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, GetJob(proto::JobOf(asked.name()), false));
  BALLAST_ASSIGN_OR_RETURN(MemberReads members, ReadsOf(job));
  return WhileItMayHeal([&]() -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(const v1::StateSummary summary, members.Summarize(asked));
    response.CopyFrom(summary);
    return absl::OkStatus();
  });
}

absl::Status Service::CallLead(const std::string& method, const Message& request, Message& response,
                               Repeat repeat) {
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, GetJob(proto::JobOf(TextOf(request, "name")), false));
  if (job.homes().empty() || job.homes(0) < 0 || job.homes(0) >= job.members_size()) {
    return absl::InternalError(absl::StrCat("the service at ", address_, " names no lead"));
  }
  BALLAST_ASSIGN_OR_RETURN(const auto lead, Other(job.members(job.homes(0)).address()));
  return lead->CallHere(method, request, response, repeat);
}

absl::StatusOr<std::unique_ptr<Service>> Service::Other(const std::string& address) const {
  BALLAST_ASSIGN_OR_RETURN(auto channel, NewChannel(address, credentials_));
  return std::make_unique<Service>(address, std::move(channel), credentials_, timeout_, wait_,
                                   clock_);
}

absl::StatusOr<std::string> Service::CallJson(const std::string& method,
                                              absl::string_view request) {
  BALLAST_ASSIGN_OR_RETURN(const MethodDescriptor* found, FindMethod(method));
  const std::unique_ptr<Message> asked = New(found->input_type());
  const std::unique_ptr<Message> answer = New(found->output_type());
  BALLAST_RETURN_IF_ERROR(proto::FromJson(request, *asked));
  BALLAST_RETURN_IF_ERROR(Call(method, *asked, *answer));
  return proto::ToJson(*answer);
}

absl::StatusOr<v1::Job> Service::GetJob(const std::string& job, bool with_parameters) {
  v1::GetJobRequest request;
  request.set_name(proto::JobName(job));
  request.set_with_parameters(with_parameters);
  return Call<v1::Job>("JobService/GetJob", request);
}

absl::StatusOr<v1::Job> Service::GetJobOfAll(const std::string& job) {
  BALLAST_ASSIGN_OR_RETURN(v1::Job found, GetJob(job, /*with_parameters=*/false));
  if (found.members().empty() || found.phase() == v1::CREATING) return found;
  const absl::StatusOr<MemberReads> members = ReadsOf(found);
  if (members.ok()) {
    members->Complete(found);
    return found;
  }
  for (int i = 0; i < found.members_size(); ++i) {
    if (i == found.answering_member()) continue;
    found.mutable_members(i)->set_problem(std::string(members.status().message()));
  }
  return found;
}

absl::Status Service::Suggest(const absl::Status& status, const std::string& name) {
  if (!absl::IsNotFound(status)) return status;
  std::vector<std::string> names;
  if (ReasonOf(status) == reason::kNoSuchJob) {
    const auto there = Call<v1::ListJobsResponse>(kListJobs, v1::ListJobsRequest());
    // The list would only have made the message better, so the first error stands.
    if (!there.ok()) return status;
    for (const v1::Job& job : there->jobs()) names.push_back(proto::BareName(job.name()));
    return WithReason(absl::NotFoundError(absl::StrCat(status.message(), "; asked at ", address_,
                                                       Suggestion(proto::JobOf(name), names))),
                      reason::kNoSuchJob);
  }
  const bool is_parameter = proto::ParseParameterName(name).ok();
  if (!is_parameter && !proto::ParseGroupName(name).ok()) return status;
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, GetJob(proto::JobOf(name), is_parameter));
  for (const v1::Parameter& known : job.parameters())
    names.push_back(proto::BareName(known.name()));
  if (!is_parameter) {
    for (const v1::ParamGroup& known : job.groups()) names.push_back(proto::BareName(known.name()));
  }
  const std::string wanted = proto::BareName(name);
  // It is there, so something else was not found: the first error says what.
  if (std::find(names.begin(), names.end(), wanted) != names.end()) return status;
  return absl::NotFoundError(absl::StrCat("job ", proto::JobOf(name), " has no ",
                                          is_parameter ? "parameter " : "group ", wanted,
                                          Suggestion(wanted, names)));
}

absl::Status Service::ReadState(
    const v1::ReadStateRequest& request, const std::function<void()>& begin,
    const std::function<absl::Status(const v1::ReadStateResponse&)>& receive) {
  BALLAST_RETURN_IF_ERROR(GoTo(proto::JobOf(request.name())));
  const absl::Status read = Suggest(WhileItMayHeal([&]() -> absl::Status {
                                      begin();
                                      BALLAST_RETURN_IF_ERROR(Connect());
                                      // gRPC allows a context for one call only.
                                      grpc::ClientContext context;
                                      SetDeadline(context);
                                      v1::StateService::Stub stub(channel_);
                                      return ReadAll<v1::ReadStateResponse>(
                                          context, *stub.ReadState(&context, request), receive);
                                    }),
                                    request.name());
  if (ReasonOf(read) != reason::kOtherMembersHaveParts) return read;
  BALLAST_ASSIGN_OR_RETURN(const v1::Job job, GetJob(proto::JobOf(request.name()), false));
  BALLAST_ASSIGN_OR_RETURN(MemberReads members, ReadsOf(job));
  return WhileItMayHeal([&]() -> absl::Status {
    begin();
    return members.Read(request, receive);
  });
}

absl::StatusOr<MemberReads> Service::ReadsOf(const v1::Job& job) const {
  std::vector<MemberReads::Member> members;
  for (const v1::JobMember& member : job.members()) {
    // The service that was asked may be reached by another address than the other members use.
    const bool is_asked = static_cast<int>(members.size()) == job.answering_member();
    members.push_back({member.address(), channel_});
    if (is_asked) continue;
    BALLAST_ASSIGN_OR_RETURN(members.back().channel, NewChannel(member.address(), credentials_));
  }
  return MemberReads(std::move(members), job.uid(), credentials_, timeout_, clock_);
}

absl::StatusOr<v1::WriteStateResponse> Service::WriteState(
    const v1::OpenWriteState& open, const std::function<absl::StatusOr<std::string>()>& next) {
  BALLAST_RETURN_IF_ERROR(GoTo(proto::JobOf(open.name())));
  BALLAST_RETURN_IF_ERROR(Connect());
  grpc::ClientContext context;
  SetDeadline(context);
  v1::WriteStateResponse response;
  v1::StateService::Stub stub(channel_);
  const auto writer = stub.WriteState(&context, &response);
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
  if (!status.ok()) return Suggest(Explain(status), open.name());
  return response;
}

absl::Status Service::ReadTrace(
    const v1::TraceJobRequest& request,
    const std::function<absl::Status(const v1::TraceJobResponse&)>& receive) {
  BALLAST_RETURN_IF_ERROR(GoTo(proto::JobOf(request.name())));
  // This is not tried again: a second call would trace other steps than those that were waited for.
  BALLAST_RETURN_IF_ERROR(Connect());
  grpc::ClientContext context;
  SetDeadline(context);
  v1::JobService::Stub stub(channel_);
  return Suggest(ReadAll(context, *stub.TraceJob(&context, request), receive), request.name());
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

}  // namespace ballast::client
