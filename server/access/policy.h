// Who has which role, from --roles-file and --tokens-file.
//
// Each line of the roles is: ROLE JOBS PRINCIPAL
//
//   operator  *      user:root
//   trainer   gpt-*  token:ci
//   viewer    *      cert:Grafana of the second floor
//   viewer    *      *
//
// JOBS is a pattern of job names, in which * matches anything. PRINCIPAL is the common name of a
// client certificate, a user of this host by name or number, a token's name, or * for every
// authenticated caller. If several lines match a caller and a job, the highest role counts.
//
// Each line of the tokens is: NAME SHA256, the digest of the token in hexadecimal.
//
// In both files empty lines and lines that begin with # are ignored.
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
  // From the files' contents; messages name the files. INVALID_ARGUMENT, in one line with the
  // line's number: an unknown role, an unknown user of this host, or an invalid line.
  static absl::StatusOr<Policy> Parse(absl::string_view roles, const std::string& roles_file,
                                      absl::string_view tokens, const std::string& tokens_file);

  // The name of the token with this digest. Takes the same time for every digest.
  std::optional<std::string> TokenWith(const TokenDigest& digest) const;

  Role RoleOf(absl::string_view principal, absl::string_view job) const;
  // For all possible jobs: by the lines for *.
  Role RoleOfAll(absl::string_view principal) const;
  // For any job.
  Role HighestRoleOf(absl::string_view principal) const;
  // Whether a line names this principal.
  bool Names(absl::string_view principal) const;

  // Tokens in the roles file that the tokens file does not define.
  std::vector<std::string> MissingTokens() const;

  size_t roles() const { return roles_.size(); }
  size_t tokens() const { return tokens_.size(); }

 private:
  struct Line {
    Role role;
    std::string jobs;
    std::string principal;
  };
  // The highest role in the lines for the principal whose jobs match.
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
