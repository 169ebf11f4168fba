#include "server/access/access.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "server/access/method_rules.h"
#include "server/access/unix_users.h"

namespace ballast::server {
namespace {

constexpr std::chrono::seconds kWarnEvery(10);
constexpr size_t kMostRequestBytes = 512;  // In a line of the audit.
constexpr absl::string_view kAuthorization = "authorization";
constexpr absl::string_view kBearer = "Bearer ";

std::string Property(const grpc::AuthContext* context, const char* name) {
  if (context == nullptr) return "";
  const std::vector<grpc::string_ref> values = context->FindPropertyValues(name);
  if (values.empty()) return "";
  return std::string(values.front().data(), values.front().size());
}

// Of "Bearer TOKEN". Empty: it is none.
std::string TokenOf(absl::string_view authorization) {
  if (!absl::ConsumePrefix(&authorization, kBearer)) return "";
  return std::string(authorization);
}

absl::string_view UserAgent(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find("user-agent");
  if (found == context.client_metadata().end()) return "";
  return {found->second.data(), found->second.size()};
}

// The value of "authorization: Bearer TOKEN"; nullopt: there is no such header.
std::optional<std::string> BearerToken(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find(
      grpc::string_ref(kAuthorization.data(), kAuthorization.size()));
  if (found == context.client_metadata().end()) return std::nullopt;
  return TokenOf({found->second.data(), found->second.size()});
}

// Its common name, or the first of its other names. Empty: it has none that fits into a line.
std::string NameOfCertificate(const grpc::AuthContext& context) {
  std::string name = Property(&context, GRPC_X509_CN_PROPERTY_NAME);
  if (name.empty()) name = Property(&context, GRPC_X509_SAN_PROPERTY_NAME);
  return std::any_of(name.begin(), name.end(), absl::ascii_iscntrl) ? std::string() : name;
}

}  // namespace

absl::Status Caller::Check(absl::string_view job) const {
  const Role role = access_->RoleOf(*this, job);
  if (role >= needed_) return absl::OkStatus();
  return access_->Refuse(
      *this, absl::PermissionDeniedError(
                 absl::StrCat(principal_, " is ", role == Role::kNobody ? "" : "a ", Name(role),
                              " of job ", job, ", and ", method_, " takes a role of ",
                              Name(needed_), "; ask who writes the service's --roles-file")));
}

bool Caller::MayUse(absl::string_view job) const { return access_->RoleOf(*this, job) >= needed_; }

std::function<bool()> Caller::IsRevoked(std::string job) const {
  return [caller = *this, job = std::move(job)] { return !caller.MayUse(job); };
}

void Caller::Audit(const absl::Status& end) const {
  if (needed_ != Role::kOperator || (!end.ok() && !access_->has_roles())) return;
  access_->audit_(absl::StrCat("audit: ", principal_, " from ", peer_, ": ", method_, " ", request_,
                               ": ", end.ok() ? "done" : end.message()));
}

absl::StatusOr<std::unique_ptr<Access>> Access::Open(AccessOptions options, Log audit, Log warn) {
  if (!options.tokens.empty() && options.roles.empty()) {
    return absl::InvalidArgumentError(
        "--tokens-file says who somebody is, not what they may do: give --roles-file, too");
  }
  auto access =
      std::unique_ptr<Access>(new Access(std::move(options), std::move(audit), std::move(warn)));
  BALLAST_RETURN_IF_ERROR(access->ReadAgain());
  return access;
}

absl::StatusOr<std::shared_ptr<const Policy>> Access::ReadPolicy() const {
  if (!has_roles()) return std::make_shared<const Policy>();
  BALLAST_ASSIGN_OR_RETURN(const std::string roles,
                           ReadCredentialFile(options_.roles, Others::kMayRead));
  std::string tokens;
  if (!options_.tokens.empty()) {
    BALLAST_ASSIGN_OR_RETURN(tokens, ReadCredentialFile(options_.tokens, Others::kMayDoNothing));
  }
  BALLAST_ASSIGN_OR_RETURN(Policy policy,
                           Policy::Parse(roles, options_.roles, tokens, options_.tokens));
  return std::make_shared<const Policy>(std::move(policy));
}

absl::Status Access::ReadAgain() {
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<const Policy> read, ReadPolicy());
  MutexLock lock(mutex_);
  policy_ = std::move(read);
  return absl::OkStatus();
}

absl::Status Access::CheckThatTokensAreThere() const {
  const std::vector<std::string> missing = policy()->MissingTokens();
  if (missing.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      options_.roles, " has a role of token:", absl::Utf8SafeCEscape(missing.front()), ", and ",
      options_.tokens.empty() ? "there is no --tokens-file"
                              : absl::StrCat(options_.tokens, " has no token of that name"),
      "; add the token, or remove the role"));
}

std::shared_ptr<const Policy> Access::policy() const {
  MutexLock lock(mutex_);
  return policy_;
}

bool Access::Knows(absl::string_view principal) const {
  return !has_roles() || policy()->Names(principal);
}

std::string Access::ToLine() const {
  const std::string tls =
      !has_tls()
          ? "nothing is encrypted"
          : absl::StrCat("TLS over TCP",
                         options_.tls_client_ca.empty() ? "" : ", with clients' certificates");
  if (has_roles()) {
    const std::shared_ptr<const Policy> now = policy();
    return absl::StrCat(now->roles(), " lines of roles, ", now->tokens(), " tokens; ", tls);
  }
  if (has_tls() && !options_.tls_client_ca.empty()) {
    return absl::StrCat("without --roles-file every holder of a certificate of ",
                        options_.tls_client_ca,
                        ", and who reaches a unix socket, is an operator of all jobs; ", tls);
  }
  return absl::StrCat(
      "without --roles-file everybody who reaches an address is an operator of all jobs: every "
      "user "
      "of this host for one on loopback, and for others every host that gets there; ",
      tls);
}

absl::StatusOr<Caller> Access::Admit(const grpc::ServerContextBase& context,
                                     absl::string_view method,
                                     const google::protobuf::Message* request) const {
  BALLAST_RETURN_IF_ERROR(CheckClientVersion(UserAgent(context)));
  Caller caller;
  caller.access_ = this;
  caller.method_ = std::string(method);
  caller.needed_ = RuleOf(method).value_or(Role::kOperator);
  caller.peer_ = context.peer();
  const absl::Status known = Identify(context, caller);
  if (!known.ok()) return Refuse(caller, known);
  if (caller.needed_ == Role::kOperator && request != nullptr) {
    caller.request_ = request->ShortDebugString().substr(0, kMostRequestBytes);
  }
  return WithRole(std::move(caller));
}

absl::StatusOr<Caller> Access::WithRole(Caller caller) const {
  if (RoleOf(caller, std::nullopt) >= caller.needed_) return caller;
  return Refuse(caller, absl::PermissionDeniedError(absl::StrCat(
                            caller.principal_, " has no role of ", Name(caller.needed_),
                            " for any job, which ", caller.method_,
                            " takes; ask who writes the service's --roles-file")));
}

absl::StatusOr<std::optional<Caller>> Access::AdmitViewer(const HttpPeer& peer) const {
  if (!has_tokens() && options_.tls_client_ca.empty()) return std::nullopt;
  Caller caller;
  caller.access_ = this;
  caller.method_ = "the status page";
  caller.needed_ = Role::kViewer;
  caller.peer_ = peer.peer;
  if (const absl::Status known = IdentifyViewer(peer, caller); !known.ok()) {
    return Refuse(caller, known);
  }
  return WithRole(std::move(caller));
}

absl::Status Access::IdentifyViewer(const HttpPeer& peer, Caller& caller) const {
  const std::string token = TokenOf(peer.authorization);
  if (has_tokens() && !token.empty()) return IdentifyByToken(token, caller);
  const bool wants_to_give_one = has_tokens() && !peer.authorization.empty();
  if (peer.certificate_name.has_value() && !wants_to_give_one) {
    if (!peer.certificate_name->empty()) {
      caller.principal_ = CertificatePrincipal(*peer.certificate_name);
    }
    if (!has_roles() && caller.principal_.empty()) caller.principal_ = "somebody";
    if (!caller.principal_.empty()) return absl::OkStatus();
  }
  return absl::UnauthenticatedError(absl::StrCat(
      has_tokens() ? "give a token that the service knows: Authorization: Bearer TOKEN" : "",
      has_tokens() && !options_.tls_client_ca.empty() ? "; or " : "",
      options_.tls_client_ca.empty()
          ? ""
          : "show a client's certificate that an authority of --tls-client-ca has signed"));
}

absl::Status Access::Identify(const grpc::ServerContextBase& context, Caller& caller) const {
  const std::shared_ptr<const grpc::AuthContext> connection = context.auth_context();
  const std::string user = Property(connection.get(), kUserProperty);
  const std::string security =
      Property(connection.get(), GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  const bool tls =
      security == GRPC_TLS_TRANSPORT_SECURITY_TYPE || security == GRPC_SSL_TRANSPORT_SECURITY_TYPE;
  if (!user.empty()) {
    caller.principal_ = user;
  } else if (tls) {
    const std::string name = NameOfCertificate(*connection);
    if (!name.empty()) caller.principal_ = CertificatePrincipal(name);
  }
  if (!has_roles()) {
    if (caller.principal_.empty()) caller.principal_ = "somebody";
    return absl::OkStatus();
  }
  if (const std::optional<std::string> token = BearerToken(context); token.has_value()) {
    if (user.empty() && !tls) {
      return absl::UnauthenticatedError(
          "tokens are taken over TLS and unix sockets only, so that nobody reads them on their "
          "way; "
          "this one has been seen: replace it");
    }
    BALLAST_RETURN_IF_ERROR(IdentifyByToken(*token, caller));
  }
  if (!caller.principal_.empty()) return absl::OkStatus();
  return absl::UnauthenticatedError(
      "the service takes calls of those only who say who they are: give --token-file, or "
      "--tls-cert "
      "and --tls-key");
}

absl::Status Access::IdentifyByToken(absl::string_view token, Caller& caller) const {
  const TokenDigest digest = DigestOf(token);
  const std::optional<std::string> name = policy()->TokenWith(digest);
  if (!name.has_value()) {
    return absl::UnauthenticatedError(
        "the service knows no such token; see to --token-file, and to the service's "
        "--tokens-file");
  }
  caller.principal_ = TokenPrincipal(*name);
  caller.token_ = digest;
  return absl::OkStatus();
}

Role Access::RoleOf(const Caller& caller, std::optional<absl::string_view> job) const {
  if (!has_roles()) return Role::kOperator;
  const std::shared_ptr<const Policy> now = policy();
  // The name may by now be another token's.
  if (caller.token_.has_value()) {
    const std::optional<std::string> name = now->TokenWith(*caller.token_);
    if (!name.has_value() || TokenPrincipal(*name) != caller.principal_) return Role::kNobody;
  }
  return job.has_value() ? now->RoleOf(caller.principal_, *job)
                         : now->HighestRoleOf(caller.principal_);
}

absl::Status Access::Refuse(const Caller& caller, absl::Status why) const {
  int64_t refused = 0;
  {
    MutexLock lock(mutex_);
    ++refused_;
    const auto now = std::chrono::steady_clock::now();
    if (now - warned_ < kWarnEvery) return why;
    warned_ = now;
    refused = std::exchange(refused_, 0);
  }
  warn_(absl::StrCat("refused ", refused, " calls, the last one ", caller.method_, " of ",
                     caller.principal_.empty() ? "nobody" : caller.principal_, " from ",
                     caller.peer_, ": ", why.message()));
  return why;
}

}  // namespace ballast::server
