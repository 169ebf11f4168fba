#include "server/access/access.h"

#include <google/protobuf/text_format.h>
#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/common/text/printable.h"
#include "server/access/method_rules.h"
#include "server/access/unix_users.h"

namespace ballast::server {
namespace {

// In a line of the log. What a client sends may be large, and have ends of lines.
constexpr size_t kMostNameBytes = 256;
constexpr size_t kMostTextBytes = 1024;
constexpr char kUnknown[] = "an unknown caller";
constexpr absl::string_view kAuthorization = "authorization";
// The scheme of RFC 6750, in this spelling only.
constexpr absl::string_view kBearer = "Bearer ";

std::string Property(const grpc::AuthContext* context, const char* name) {
  if (context == nullptr) return "";
  const std::vector<grpc::string_ref> values = context->FindPropertyValues(name);
  if (values.empty()) return "";
  // A certificate may have several other names: the first counts.
  return std::string(values.front().data(), values.front().size());
}

// The token in "Bearer TOKEN". Empty: it has another form, or no token.
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
  // A name with the end of a line in it could pretend to be a second line of the log.
  return std::any_of(name.begin(), name.end(), absl::ascii_iscntrl) ? std::string() : name;
}

// For the audit; the values of long fields are cut.
std::string TextOf(const google::protobuf::Message& request) {
  google::protobuf::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  printer.SetTruncateStringFieldLongerThan(kMostNameBytes);
  std::string text;
  printer.PrintToString(request, &text);
  return OneLine(absl::StripAsciiWhitespace(text), kMostTextBytes);
}

// The answer to a principal with this role, which is below the needed one.
std::string Lacking(absl::string_view principal, Role role, absl::string_view jobs,
                    absl::string_view method, Role needed) {
  const std::string has = role == Role::kNobody ? std::string("has no role for")
                                                : absl::StrCat("is a ", Name(role), " of");
  return absl::StrCat(principal, " ", has, " ", jobs, ", but ", method, " needs the role ",
                      Name(needed), "; ask for a line in the service's --roles-file");
}

}  // namespace

absl::Status Caller::Check(absl::string_view job) const {
  // A mistake of the caller and no refusal, so it is neither counted nor logged here.
  BALLAST_RETURN_IF_ERROR(CheckJobName(job));
  const Role role =
      access_->RoleOf(*this, [&](const Policy& policy) { return policy.RoleOf(principal_, job); });
  if (role >= needed_) return absl::OkStatus();
  // The same answer whether there is such a job or not: it is looked for only after this.
  return access_->Refuse(
      *this, absl::PermissionDeniedError(
                 Lacking(principal_, role, absl::StrCat("job ", job), method_, needed_)));
}

absl::Status Caller::CheckAllJobs() const {
  const Role role =
      access_->RoleOf(*this, [&](const Policy& policy) { return policy.RoleOfAll(principal_); });
  if (role >= needed_) return absl::OkStatus();
  return access_->Refuse(*this, absl::PermissionDeniedError(
                                    Lacking(principal_, role, "all jobs (*)", method_, needed_)));
}

bool Caller::Has(Role role, absl::string_view job) const {
  return access_->RoleOf(
             *this, [&](const Policy& policy) { return policy.RoleOf(principal_, job); }) >= role;
}

std::function<bool(absl::string_view)> Caller::MayUseNow() const {
  if (!access_->has_roles()) return [](absl::string_view) { return true; };
  return [policy = access_->policy(), caller = *this](absl::string_view job) {
    // Not by caller.access_, which may be gone.
    return Access::RoleIn(*policy, caller, [&](const Policy& of) {
             return of.RoleOf(caller.principal_, job);
           }) >= caller.needed_;
  };
}

std::function<bool()> Caller::IsRevoked(std::string job) const {
  // RoleOf asks the policy that is in force then, so files that are read again reach streams that
  // are open.
  return [caller = *this, job = std::move(job)] { return !caller.MayUse(job); };
}

void Caller::Asks(const google::protobuf::Message& request) {
  // Audit logs the methods of operators only, so no text is made for others.
  if (needed_ == Role::kOperator) request_ = TextOf(request);
}

void Caller::Audit(const absl::Status& end) const {
  if (needed_ != Role::kOperator || (!end.ok() && !access_->has_roles())) return;
  access_->audit_(absl::StrCat("audit: ", OneLine(principal_, kMostNameBytes), " from ", peer_,
                               ": ", method_, request_.empty() ? "" : " ", request_, ": ",
                               end.ok() ? "done" : OneLine(end.message(), kMostTextBytes)));
}

absl::StatusOr<std::unique_ptr<Access>> Access::Open(AccessOptions options, Log audit, Log warn) {
  if (!options.tokens.empty() && options.roles.empty()) {
    return absl::InvalidArgumentError(
        "--tokens-file identifies callers but grants no rights: give --roles-file as well");
  }
  auto access =
      std::unique_ptr<Access>(new Access(std::move(options), std::move(audit), std::move(warn)));
  // Also without roles: the policy is then empty, and policy_ is never null.
  BALLAST_RETURN_IF_ERROR(access->ReadAgain());
  return access;
}

absl::StatusOr<std::shared_ptr<const Policy>> Access::ReadPolicy() const {
  if (!has_roles()) return std::make_shared<const Policy>();
  BALLAST_ASSIGN_OR_RETURN(const std::string roles,
                           ReadCredentialFile(options_.roles, Others::kMayRead));
  // Roles are no secret. A digest is one: whoever has it can try tokens against it without asking
  // the service.
  std::string tokens;
  if (!options_.tokens.empty()) {
    BALLAST_ASSIGN_OR_RETURN(tokens, ReadCredentialFile(options_.tokens, Others::kMayDoNothing));
  }
  BALLAST_ASSIGN_OR_RETURN(Policy policy,
                           Policy::Parse(roles, options_.roles, tokens, options_.tokens));
  return std::make_shared<const Policy>(std::move(policy));
}

absl::Status Access::ReadAgain() {
  // Read without the lock, and only then exchanged: calls go on by the old policy meanwhile, and
  // also where the new one is wrong.
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<const Policy> read, ReadPolicy());
  MutexLock lock(mutex_);
  policy_ = std::move(read);
  return absl::OkStatus();
}

absl::Status Access::CheckThatTokensAreThere() const {
  const std::vector<std::string> missing = policy()->MissingTokens();
  if (missing.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      options_.roles, " names token:", absl::Utf8SafeCEscape(missing.front()), ", but ",
      options_.tokens.empty() ? "there is no --tokens-file"
                              : absl::StrCat(options_.tokens, " does not define it"),
      "; add the token or remove the role"));
}

std::shared_ptr<const Policy> Access::policy() const {
  // A share of it: callers look into it without the lock, and it stays as it is for them when
  // ReadAgain puts another one in its place.
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
                        ", and every user of a unix socket, is an operator of all jobs; ", tls);
  }
  return absl::StrCat(
      "without --roles-file every caller is an operator of all jobs: on loopback every user of "
      "this host, on other addresses every host that reaches them; ",
      tls);
}

absl::StatusOr<Caller> Access::Admit(const grpc::ServerContextBase& context,
                                     absl::string_view method) const {
  BALLAST_RETURN_IF_ERROR(CheckClientVersion(UserAgent(context)));
  Caller caller;
  caller.access_ = this;
  caller.method_ = std::string(method);
  // A method without a rule is an operator's, so that a rule that was forgotten opens nothing.
  caller.needed_ = RuleOf(method).value_or(Role::kOperator);
  caller.peer_ = context.peer();
  const absl::Status known = Identify(context, caller);
  if (!known.ok()) return Refuse(caller, known);
  return WithRole(std::move(caller));
}

absl::StatusOr<Caller> Access::WithRole(Caller caller) const {
  const Role role =
      RoleOf(caller, [&](const Policy& policy) { return policy.HighestRoleOf(caller.principal_); });
  if (role >= caller.needed_) return caller;
  return Refuse(caller, absl::PermissionDeniedError(absl::StrCat(
                            caller.principal_, " does not have the role ", Name(caller.needed_),
                            " for any job, but ", caller.method_,
                            " needs it; ask for a line in the service's --roles-file")));
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
  // A header without a token is refused, and not passed over for the certificate: whoever sends one
  // means to be a token, as in Identify.
  const bool wants_to_give_one = has_tokens() && !peer.authorization.empty();
  if (peer.certificate_name.has_value() && !wants_to_give_one) {
    if (!peer.certificate_name->empty()) {
      caller.principal_ = CertificatePrincipal(*peer.certificate_name);
    }
    // Without roles a certificate that is trusted is enough, whatever name it has.
    if (!has_roles() && caller.principal_.empty()) caller.principal_ = kUnknown;
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
  // UnixUsers has set it, in this process: nothing that a client sends can.
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
  // Every caller may do everything. The name is for the log only, and a token is not looked at.
  if (!has_roles()) {
    if (caller.principal_.empty()) caller.principal_ = kUnknown;
    return absl::OkStatus();
  }
  // A token is stronger than the connection: a call that brings one is that token's alone.
  if (const std::optional<std::string> token = BearerToken(context); token.has_value()) {
    // Others may have read it on its way, so even a right one is refused, and it is not looked up.
    if (user.empty() && !tls) {
      return absl::UnauthenticatedError(
          "tokens are accepted only over TLS and unix sockets; others could read this one: "
          "replace it");
    }
    BALLAST_RETURN_IF_ERROR(IdentifyByToken(*token, caller));
  }
  if (!caller.principal_.empty()) return absl::OkStatus();
  return absl::UnauthenticatedError(
      "the service cannot identify the caller: give --token-file, or --tls-cert and --tls-key");
}

absl::Status Access::IdentifyByToken(absl::string_view token, Caller& caller) const {
  // Refused before its digest is looked up: no line of the tokens file can make a header without a
  // token count as one.
  if (token.empty()) {
    return absl::UnauthenticatedError(
        "the header `authorization` has no token: send Bearer TOKEN, or leave out the header");
  }
  const TokenDigest digest = DigestOf(token);
  const std::optional<std::string> name = policy()->TokenWith(digest);
  if (!name.has_value()) {
    return absl::UnauthenticatedError(
        "the service does not know this token; check --token-file and the service's --tokens-file");
  }
  caller.principal_ = TokenPrincipal(*name);
  caller.token_ = digest;
  return absl::OkStatus();
}

Role Access::RoleOf(const Caller& caller, const std::function<Role(const Policy&)>& find) const {
  return has_roles() ? RoleIn(*policy(), caller, find) : Role::kOperator;
}

Role Access::RoleIn(const Policy& policy, const Caller& caller,
                    const std::function<Role(const Policy&)>& find) {
  // The name may by now be another token's.
  if (caller.token_.has_value()) {
    const std::optional<std::string> name = policy.TokenWith(*caller.token_);
    if (!name.has_value() || TokenPrincipal(*name) != caller.principal_) return Role::kNobody;
  }
  return find(policy);
}

absl::Status Access::Refuse(const Caller& caller, absl::Status why) const {
  // The line is made only when it is written, so a flood of refused calls costs little.
  refusals_->Happened([&](int64_t refused) {
    const std::string principal = OneLine(caller.principal_, kMostNameBytes);
    return absl::StrCat("refused ", refused, " calls, the last one ", caller.method_, " of ",
                        principal.empty() ? kUnknown : principal, " from ", caller.peer_, ": ",
                        OneLine(why.message(), kMostTextBytes));
  });
  return why;
}

}  // namespace ballast::server
