// Authentication and authorization: every call and every stream passes here.
//
//   absl::StatusOr<Caller> caller = access.Admit(context, "JobService.AbortStep");
//   ...
//   BALLAST_ASSIGN_OR_RETURN(job, FindJob(engine, *caller, request.name()));  // caller.Check(name)
//
// A call is admitted if its principal has the method's role (method_rules.h) for any job. Code that
// then finds a job by name needs the Caller, which checks the role for that job.
#ifndef BALLAST_SERVER_ACCESS_ACCESS_H_
#define BALLAST_SERVER_ACCESS_ACCESS_H_

#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/rare_warning.h"
#include "server/access/access_options.h"
#include "server/access/policy.h"
#include "server/access/role.h"

namespace ballast::server {

class Access;

// One call's principal. A value; the Access outlives it.
class Caller {
 public:
  // PERMISSION_DENIED unless the principal has the method's role for this job, now.
  // INVALID_ARGUMENT: an invalid job name.
  absl::Status Check(absl::string_view job) const;
  // PERMISSION_DENIED unless it has that role for all possible jobs, by a line for *.
  absl::Status CheckAllJobs() const;
  // As Check, but a refusal is neither logged nor counted.
  bool MayUse(absl::string_view job) const { return Has(needed_, job); }
  bool Has(Role role, absl::string_view job) const;
  // The same, by the current roles. The result may outlive the Access.
  std::function<bool(absl::string_view job)> MayUseNow() const;
  // For a stream of this job: whether Check would fail now. Cheap.
  std::function<bool()> IsRevoked(std::string job) const;
  // The call's request, for the audit.
  void Asks(const google::protobuf::Message& request);
  // Logs what an operator has changed: who, what, from where. With roles, it also logs failures and
  // refusals after Admit. Without roles it does not, because any user could fill the log.
  void Audit(const absl::Status& end) const;

  const std::string& peer() const { return peer_; }  // gRPC's name for it.
  const std::string& principal() const { return principal_; }

 private:
  friend class Access;
  Caller() = default;

  const Access* access_ = nullptr;
  std::string method_;
  Role needed_ = Role::kOperator;
  std::string principal_;  // As in the roles file; empty: an unknown caller.
  std::optional<TokenDigest> token_;
  std::string peer_;
  std::string request_;  // For the audit.
};

// Thread-safe.
class Access {
 public:
  using Log = std::function<void(const std::string& line)>;

  // INVALID_ARGUMENT, in one line, for files that are missing, wrong, or readable by others.
  // `audit` gets a line for each change, `warn` gets warnings for an operator.
  static absl::StatusOr<std::unique_ptr<Access>> Open(AccessOptions options, Log audit, Log warn);

  // `method` is "Service.Method". FAILED_PRECONDITION: the client's release does not work with this
  // one (version.h). UNAUTHENTICATED: the call has no token or certificate, or an unknown token.
  // PERMISSION_DENIED: the principal does not have the method's role for any job. All this happens
  // before the request is read.
  absl::StatusOr<Caller> Admit(const grpc::ServerContextBase& context,
                               absl::string_view method) const;

  // A peer over HTTP.
  struct HttpPeer {
    absl::string_view authorization;  // The header of this name; may be empty.
    // The common name of the peer's trusted certificate; empty: the certificate has none. nullopt:
    // the peer has no certificate.
    std::optional<std::string> certificate_name;
    std::string peer;  // Its address.
  };
  // Admits a viewer by token or certificate. nullopt: any peer may look at all jobs, because the
  // service has no tokens and trusts no certificates. Errors as in Admit.
  absl::StatusOr<std::optional<Caller>> AdmitViewer(const HttpPeer& peer) const;

  // INVALID_ARGUMENT: the roles file names a token that the tokens file does not define. In new
  // files this is an error. In a running service the token has been revoked.
  absl::Status CheckThatTokensAreThere() const;

  // The access rules, in one line for the log.
  std::string ToLine() const;
  // Without roles every caller may do everything.
  bool has_roles() const { return !options_.roles.empty(); }
  bool has_tokens() const { return !options_.tokens.empty(); }
  bool has_tls() const { return !options_.tls_certificate.empty(); }
  const AccessOptions& options() const { return options_; }
  // Whether the roles, if any, name this principal.
  bool Knows(absl::string_view principal) const;

  // Reads roles and tokens again. Returns an error, and then keeps the old ones.
  absl::Status ReadAgain();

 private:
  friend class Caller;

  Access(AccessOptions options, Log audit, Log warn)
      : options_(std::move(options)),
        audit_(std::move(audit)),
        refusals_(std::make_unique<RareWarning>(std::move(warn))) {}
  absl::StatusOr<std::shared_ptr<const Policy>> ReadPolicy() const;
  std::shared_ptr<const Policy> policy() const;
  absl::Status Identify(const grpc::ServerContextBase& context, Caller& caller) const;
  absl::Status IdentifyViewer(const HttpPeer& peer, Caller& caller) const;
  // UNAUTHENTICATED: the token is unknown.
  absl::Status IdentifyByToken(absl::string_view token, Caller& caller) const;
  // PERMISSION_DENIED: the caller does not have the role for any job.
  absl::StatusOr<Caller> WithRole(Caller caller) const;
  // The role that `find` finds for the caller's principal.
  Role RoleOf(const Caller& caller, const std::function<Role(const Policy&)>& find) const;
  // By that policy; kNobody if the caller's token is not in it.
  static Role RoleIn(const Policy& policy, const Caller& caller,
                     const std::function<Role(const Policy&)>& find);
  // Counts a refused call, and logs a warning now and then.
  absl::Status Refuse(const Caller& caller, absl::Status why) const;

  const AccessOptions options_;
  const Log audit_;
  const std::unique_ptr<RareWarning> refusals_;
  mutable Mutex mutex_;
  std::shared_ptr<const Policy> policy_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_ACCESS_H_
