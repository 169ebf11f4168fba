// Who has which role, as --roles-file and --tokens-file say.
//
// Each line of the roles is: ROLE JOBS PRINCIPAL
//
//   operator  *      user:root
//   trainer   gpt-*  token:ci
//   viewer    *      cert:Grafana of the second floor
//   viewer    *      *
//
// JOBS is a pattern of job names, in which * stands for anything. PRINCIPAL is the common name of a
// client certificate, a user of this host by name or number, a token by its name, or * for every
// caller that is known at all. Of the lines that fit a caller and a job the highest role counts.
//
// Each line of the tokens is: NAME SHA256, the digest of the token in hexadecimal.
//
// In both, empty lines and what follows a # at the beginning of a line mean nothing.
#ifndef BALLAST_SERVER_ACCESS_POLICY_H_
#define BALLAST_SERVER_ACCESS_POLICY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/access/role.h"

namespace ballast::server {

using TokenDigest = std::array<uint8_t, 32>;
TokenDigest DigestOf(absl::string_view token);

// Names of principals, as in the roles file.
std::string CertificatePrincipal(absl::string_view common_name);
std::string UserPrincipal(uint32_t uid);
std::string TokenPrincipal(absl::string_view name);

// Immutable.
class Policy {
 public:
  // Of the contents of the files, which messages name. INVALID_ARGUMENT, in one line with the
  // line's number: a role that does not exist, a user whom this host does not know, another form.
  static absl::StatusOr<Policy> Parse(absl::string_view roles, const std::string& roles_file,
                                      absl::string_view tokens, const std::string& tokens_file);

  // The name of the token with this digest. Takes the same time for every digest.
  std::optional<std::string> TokenWith(const TokenDigest& digest) const;

  Role RoleOf(absl::string_view principal, absl::string_view job) const;
  // For all jobs that there may be: of the lines for *.
  Role RoleOfAll(absl::string_view principal) const;
  // For any job.
  Role HighestRoleOf(absl::string_view principal) const;
  // Whether a line is about this principal by its name.
  bool Names(absl::string_view principal) const;

  // The tokens that a line is about and that there are none of.
  std::vector<std::string> MissingTokens() const;

  size_t roles() const { return roles_.size(); }
  size_t tokens() const { return tokens_.size(); }

 private:
  struct Line {
    Role role;
    std::string jobs;
    std::string principal;
  };
  // The highest role in the lines for the principal that are for the right jobs.
  Role Highest(absl::string_view principal,
               const std::function<bool(const std::string& jobs)>& are_right) const;
  struct Token {
    std::string name;
    TokenDigest digest;
  };
  absl::Status AddRole(absl::string_view line);
  absl::Status AddToken(absl::string_view line);

  std::vector<Line> roles_;
  std::vector<Token> tokens_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_POLICY_H_
