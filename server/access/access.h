// Who calls, and whether that may be: every call and every stream passes here.
//
//   absl::StatusOr<Caller> caller = access.Admit(context, "JobService.AbortStep");
//   ...
//   BALLAST_ASSIGN_OR_RETURN(job, FindJob(engine, *caller, request.name()));  // caller.Check(name)
//
// A call is admitted if its principal has the method's role (method_rules.h) for any job. Code that
// then finds a job by its name needs the Caller, which checks the role for that job.
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
  // PERMISSION_DENIED unless the principal has the method's role for this job, now. INVALID_ARGUMENT:
  // no job can have this name.
  absl::Status Check(absl::string_view job) const;
  // PERMISSION_DENIED unless it has that role for all jobs that there may be, by a line for *.
  absl::Status CheckAllJobs() const;
  // As Check. A refusal is neither logged nor counted.
  bool MayUse(absl::string_view job) const;
  // The same, by the roles of now; what is returned may outlive the Access.
  std::function<bool(absl::string_view job)> MayUseNow() const;
  // For a stream of this job: whether Check would fail by now. Cheap.
  std::function<bool()> IsRevoked(std::string job) const;
  // What the call asks for, for the audit.
  void Asks(const google::protobuf::Message& request);
  // Logs what an operator has changed: who, what, from where. Where there are roles, also what failed
  // or was refused after Admit; otherwise any user could fill the log.
  void Audit(const absl::Status& end) const;

  const std::string& peer() const { return peer_; }  // As gRPC names it.
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

  // INVALID_ARGUMENT, in one line, for files that are missing, wrong, or readable by others. `audit`
  // gets a line for each change, `warn` what an operator should know.
  static absl::StatusOr<std::unique_ptr<Access>> Open(AccessOptions options, Log audit, Log warn);

  // `method` is "Service.Method". FAILED_PRECONDITION: a client of a release that does not work with
  // this one (version.h). UNAUTHENTICATED: nothing says who calls, or an unknown token does.
  // PERMISSION_DENIED: the method takes more than the principal may do with any job. No part of the
  // request has been read by then.
  absl::StatusOr<Caller> Admit(const grpc::ServerContextBase& context,
                               absl::string_view method) const;

  // Who asks over HTTP.
  struct HttpPeer {
    absl::string_view authorization;  // The header of this name; empty: there is none.
    // The common name in the certificate that it has shown and that the service trusts; empty: it
    // has none. nullopt: there is no certificate.
    std::optional<std::string> certificate_name;
    std::string peer;  // Its address.
  };
  // As a viewer, by its token or its certificate. nullopt: any peer may look at all jobs, because the
  // service has no tokens and trusts no certificates, and so does not know who asks.
  // Errors as Admit's.
  absl::StatusOr<std::optional<Caller>> AdmitViewer(const HttpPeer& peer) const;

  // INVALID_ARGUMENT: a role is of a token that there is none of. A mistake in new files; in those of
  // a service that runs, the token has been revoked.
  absl::Status CheckThatTokensAreThere() const;

  // Who may do what, in one line for the log.
  std::string ToLine() const;
  // Whether there are roles. Otherwise every caller may do everything.
  bool has_roles() const { return !options_.roles.empty(); }
  bool has_tokens() const { return !options_.tokens.empty(); }
  bool has_tls() const { return !options_.tls_certificate.empty(); }
  const AccessOptions& options() const { return options_; }
  // Whether the roles, if there are any, name this principal.
  bool Knows(absl::string_view principal) const;

  // Reads roles and tokens again. The old ones stay where there is an error, which it returns.
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
  // UNAUTHENTICATED: there is no such token.
  absl::Status IdentifyByToken(absl::string_view token, Caller& caller) const;
  // PERMISSION_DENIED: the caller has the role for no job.
  absl::StatusOr<Caller> WithRole(Caller caller) const;
  // The role that `find` finds for the caller's principal.
  Role RoleOf(const Caller& caller, const std::function<Role(const Policy&)>& find) const;
  // By that policy; nobody, if the caller's token is not in it.
  static Role RoleIn(const Policy& policy, const Caller& caller,
                     const std::function<Role(const Policy&)>& find);
  // Counts a call that is refused, and warns of them now and then.
  absl::Status Refuse(const Caller& caller, absl::Status why) const;

  const AccessOptions options_;
  const Log audit_;
  const std::unique_ptr<RareWarning> refusals_;
  mutable Mutex mutex_;
  std::shared_ptr<const Policy> policy_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_ACCESS_H_
