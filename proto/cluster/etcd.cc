#include "proto/cluster/etcd.h"

#include <grpcpp/create_channel.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "etcd/rpc.grpc.pb.h"
#include "proto/deadline.h"
#include "proto/status.h"

namespace ballast::cluster {
namespace {

// Where etcd's own client sends the token.
constexpr char kTokenKey[] = "token";

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const Etcd::Access& access) {
  if (access.cert.empty() != access.key.empty()) {
    return absl::InvalidArgumentError(
        "a certificate for etcd and its key belong together; give both");
  }
  if (access.user.empty() != access.password_file.empty()) {
    return absl::InvalidArgumentError(
        "a user for etcd and the file of its password belong together; give both");
  }
  if (access.ca.empty()) {
    if (access.cert.empty()) return grpc::InsecureChannelCredentials();
    return absl::InvalidArgumentError(
        "a certificate for etcd needs the authority of etcd's own; give that as well");
  }
  grpc::SslCredentialsOptions options;
  BALLAST_ASSIGN_OR_RETURN(options.pem_root_certs, ReadCertificateAuthority(access.ca));
  if (!access.cert.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const KeyPair pair, ReadKeyPair(access.cert, access.key));
    options.pem_cert_chain = pair.certificate;
    options.pem_private_key = pair.key;
  }
  return grpc::SslCredentials(options);
}

// The first key behind all that begin with `prefix`.
std::string EndOf(std::string prefix) {
  while (!prefix.empty() && prefix.back() == '\xff') prefix.pop_back();
  if (!prefix.empty()) ++prefix.back();
  return prefix;
}

absl::Status Changed(const std::string& key) {
  return absl::AbortedError(absl::StrCat("etcd's key ", key, " has changed meanwhile"));
}

// Where no endpoint has taken part in an answer, the next one may.
bool IsForTheNext(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE ||
         status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
}

// It has ended, or users and roles have changed since.
bool IsOfAnOldToken(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
         absl::StrContains(status.error_message(), "auth store is old");
}

}  // namespace

Etcd::Access Etcd::Access::FromEnvironment() {
  return {.ca = Variable("BALLAST_ETCD_CA"),
          .cert = Variable("BALLAST_ETCD_CERT"),
          .key = Variable("BALLAST_ETCD_KEY"),
          .user = Variable("BALLAST_ETCD_USER"),
          .password_file = Variable("BALLAST_ETCD_PASSWORD_FILE")};
}

absl::StatusOr<std::unique_ptr<Etcd>> Etcd::Create(std::vector<std::string> endpoints,
                                                   const Access& access) {
  if (endpoints.empty()) return absl::InvalidArgumentError("etcd has no endpoint");
  BALLAST_ASSIGN_OR_RETURN(const auto credentials, MakeCredentials(access));
  if (!access.user.empty()) BALLAST_RETURN_IF_ERROR(ReadTokenFile(access.password_file).status());
  return std::unique_ptr<Etcd>(new Etcd(std::move(endpoints), access, credentials));
}

Etcd::Etcd(std::vector<std::string> endpoints, Access access,
           const std::shared_ptr<grpc::ChannelCredentials>& credentials)
    : endpoints_(std::move(endpoints)),
      name_(absl::StrJoin(endpoints_, ", ")),
      access_(std::move(access)) {
  for (const std::string& endpoint : endpoints_) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
    // A connection of its own: another client's, which waits to try again, says nothing of this one.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channels_.push_back(grpc::CreateCustomChannel(endpoint, credentials, arguments));
  }
}

absl::StatusOr<std::string> Etcd::Token(const std::shared_ptr<grpc::Channel>& channel, bool again) {
  if (access_.user.empty()) return "";
  {
    MutexLock lock(mutex_);
    if (!again && !token_.empty()) return token_;
  }
  etcdserverpb::AuthenticateRequest request;
  request.set_name(access_.user);
  BALLAST_ASSIGN_OR_RETURN(*request.mutable_password(), ReadTokenFile(access_.password_file));
  grpc::ClientContext context;
  context.set_deadline(proto::Deadline(kCallTimeout));
  etcdserverpb::AuthenticateResponse response;
  const grpc::Status status =
      etcdserverpb::Auth::NewStub(channel)->Authenticate(&context, request, &response);
  if (!status.ok() && !IsForTheNext(status)) {
    return absl::PermissionDeniedError(absl::StrCat("etcd does not take the user ", access_.user,
                                                    " with the password in ", access_.password_file,
                                                    ": ", status.error_message()));
  }
  BALLAST_RETURN_IF_ERROR(proto::FromGrpc(status));
  MutexLock lock(mutex_);
  return token_ = response.token();
}

absl::Status Etcd::TryAt(size_t endpoint, const Call& call) {
  const std::shared_ptr<grpc::Channel>& channel = channels_[endpoint];
  grpc::Status status;
  // A token ends after some minutes: once more with a new one.
  for (const bool again : {false, true}) {
    BALLAST_ASSIGN_OR_RETURN(const std::string token, Token(channel, again));
    grpc::ClientContext context;
    context.set_deadline(proto::Deadline(kCallTimeout));
    context.set_wait_for_ready(false);
    if (!token.empty()) context.AddMetadata(kTokenKey, token);
    status = call(channel, context);
    if (access_.user.empty() || !IsOfAnOldToken(status)) break;
  }
  if (status.ok()) return absl::OkStatus();
  if (IsForTheNext(status)) {
    const std::string cause = proto::CauseOfUnreachable(status);
    return absl::UnavailableError(cause.empty() ? status.error_message() : cause);
  }
  const std::string said =
      absl::StrCat("etcd at ", endpoints_[endpoint], ": ", status.error_message());
  // Without a user where etcd wants one it is the argument that is wrong, in etcd's words.
  if (status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
      status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
      absl::StrContains(status.error_message(), "user name is empty")) {
    return absl::PermissionDeniedError(
        absl::StrCat(said, "; give the user and the file of its password"));
  }
  return {static_cast<absl::StatusCode>(status.error_code()), said};
}

absl::Status Etcd::Try(const Call& call) {
  size_t first = 0;
  {
    MutexLock lock(mutex_);
    first = first_;
  }
  std::vector<std::string> causes;
  for (size_t tried = 0; tried < channels_.size(); ++tried) {
    const size_t endpoint = (first + tried) % channels_.size();
    const absl::Status status = TryAt(endpoint, call);
    if (!absl::IsUnavailable(status)) {
      MutexLock lock(mutex_);
      first_ = endpoint;
      return status;
    }
    causes.push_back(absl::StrCat(endpoints_[endpoint], " (", status.message(), ")"));
  }
  return absl::UnavailableError(
      absl::StrCat("etcd does not answer: ", absl::StrJoin(causes, ", ")));
}

absl::StatusOr<Etcd::Listing> Etcd::Range(const etcdserverpb::RangeRequest& request) {
  etcdserverpb::RangeResponse response;
  BALLAST_RETURN_IF_ERROR(Try([&](const auto& channel, grpc::ClientContext& context) {
    return etcdserverpb::KV::NewStub(channel)->Range(&context, request, &response);
  }));
  Listing listing = {.entries = {}, .revision = response.header().revision()};
  for (const etcdserverpb::KeyValue& found : response.kvs()) {
    listing.entries.push_back({.key = found.key(),
                               .value = found.value(),
                               .revision = found.mod_revision(),
                               .lease = found.lease()});
  }
  return listing;
}

absl::StatusOr<Etcd::Listing> Etcd::List(const std::string& prefix) {
  etcdserverpb::RangeRequest request;
  request.set_key(prefix);
  request.set_range_end(EndOf(prefix));
  return Range(request);
}

absl::StatusOr<Etcd::Listing> Etcd::Get(const std::string& key) {
  etcdserverpb::RangeRequest request;
  request.set_key(key);
  return Range(request);
}

absl::StatusOr<etcdserverpb::TxnResponse> Etcd::WriteIf(const std::string& key, int64_t revision,
                                                        const etcdserverpb::RequestOp& write) {
  etcdserverpb::TxnRequest request;
  etcdserverpb::Compare& compare = *request.add_compare();
  compare.set_target(etcdserverpb::Compare::MOD);
  compare.set_key(key);
  compare.set_mod_revision(revision);
  *request.add_success() = write;
  request.add_failure()->mutable_request_range()->set_key(key);
  etcdserverpb::TxnResponse response;
  BALLAST_RETURN_IF_ERROR(Try([&](const auto& channel, grpc::ClientContext& context) {
    return etcdserverpb::KV::NewStub(channel)->Txn(&context, request, &response);
  }));
  return response;
}

absl::StatusOr<int64_t> Etcd::PutIf(const std::string& key, int64_t revision,
                                    const std::string& value, int64_t lease) {
  etcdserverpb::RequestOp write;
  etcdserverpb::PutRequest& put = *write.mutable_request_put();
  put.set_key(key);
  put.set_value(value);
  put.set_lease(lease);
  BALLAST_ASSIGN_OR_RETURN(const etcdserverpb::TxnResponse response, WriteIf(key, revision, write));
  if (response.succeeded()) return response.header().revision();
  // An endpoint before this one may have written it, and not answered.
  for (const etcdserverpb::ResponseOp& op : response.responses()) {
    for (const etcdserverpb::KeyValue& found : op.response_range().kvs()) {
      if (found.value() == value) return found.mod_revision();
    }
  }
  return Changed(key);
}

absl::Status Etcd::DeleteIf(const std::string& key, int64_t revision) {
  etcdserverpb::RequestOp write;
  write.mutable_request_delete_range()->set_key(key);
  BALLAST_ASSIGN_OR_RETURN(const etcdserverpb::TxnResponse response, WriteIf(key, revision, write));
  return response.succeeded() ? absl::OkStatus() : Changed(key);
}

absl::StatusOr<int64_t> Etcd::Grant(absl::Duration time) {
  etcdserverpb::LeaseGrantRequest request;
  request.set_ttl(absl::ToInt64Seconds(time));
  etcdserverpb::LeaseGrantResponse response;
  BALLAST_RETURN_IF_ERROR(Try([&](const auto& channel, grpc::ClientContext& context) {
    return etcdserverpb::Lease::NewStub(channel)->LeaseGrant(&context, request, &response);
  }));
  return response.id();
}

absl::Status Etcd::KeepAlive(int64_t lease) {
  etcdserverpb::LeaseKeepAliveRequest request;
  request.set_id(lease);
  etcdserverpb::LeaseKeepAliveResponse response;
  BALLAST_RETURN_IF_ERROR(Try([&](const auto& channel, grpc::ClientContext& context) {
    const auto stub = etcdserverpb::Lease::NewStub(channel);
    const auto call = stub->LeaseKeepAlive(&context);
    const bool answered = call->Write(request) && call->Read(&response);
    call->WritesDone();
    if (answered) context.TryCancel();
    const grpc::Status status = call->Finish();
    if (answered) return grpc::Status::OK;
    return status.ok() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "it has ended the call")
                       : status;
  }));
  if (response.ttl() > 0) return absl::OkStatus();
  return absl::NotFoundError("the lease is over");
}

absl::Status Etcd::Revoke(int64_t lease) {
  etcdserverpb::LeaseRevokeRequest request;
  request.set_id(lease);
  etcdserverpb::LeaseRevokeResponse response;
  return Try([&](const auto& channel, grpc::ClientContext& context) {
    return etcdserverpb::Lease::NewStub(channel)->LeaseRevoke(&context, request, &response);
  });
}

}  // namespace ballast::cluster
