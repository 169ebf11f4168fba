#include "server/access/policy.h"

#include <fnmatch.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <pwd.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::server {
namespace {

constexpr absl::string_view kEverybody = "*";
constexpr absl::string_view kAllJobs = "*";
constexpr absl::string_view kCertificate = "cert:";
constexpr absl::string_view kUser = "user:";
constexpr absl::string_view kToken = "token:";
constexpr size_t kDigestDigits = 2 * std::tuple_size_v<TokenDigest>;
// For the texts of one user's entry, which getpwnam_r(3) stores there.
constexpr size_t kMostUserBytes = 16384;

// The next word of `rest`, which loses it and the blanks around it.
absl::string_view TakeWord(absl::string_view& rest) {
  const size_t end = std::min(rest.find_first_of(" \t"), rest.size());
  const absl::string_view word = rest.substr(0, end);
  rest = absl::StripAsciiWhitespace(rest.substr(end));
  return word;
}

// A name as it may stand in a message.
std::string Quoted(absl::string_view text) {
  constexpr size_t kMost = 64;
  return absl::StrCat("'", absl::Utf8SafeCEscape(text.substr(0, kMost)), "'");
}

// A job's name in which some characters are *.
bool IsJobPattern(absl::string_view pattern) {
  std::string name(pattern);
  // So nothing gets through that fnmatch takes for special, but for the * itself.
  std::replace(name.begin(), name.end(), '*', 'x');
  return IsJobName(name);
}

absl::StatusOr<uint32_t> UidOf(absl::string_view user) {
  uint32_t uid = 0;
  // A number needs no entry: in a container a user often has none.
  if (absl::SimpleAtoi(user, &uid)) return uid;
  passwd entry = {};
  passwd* found = nullptr;
  std::vector<char> memory(kMostUserBytes);
  getpwnam_r(std::string(user).c_str(), &entry, memory.data(), memory.size(), &found);
  if (found != nullptr) return found->pw_uid;
  return absl::InvalidArgumentError(absl::StrCat("this host has no user ", Quoted(user),
                                                 "; give the name or the number of a user"));
}

absl::StatusOr<std::string> ParsePrincipal(absl::string_view text) {
  absl::string_view name = text;
  if (text == kEverybody) return std::string(text);
  if (absl::ConsumePrefix(&name, kUser)) {
    // Kept as a number, which is what the system tells of a connection (UnixUsers).
    BALLAST_ASSIGN_OR_RETURN(const uint32_t uid, UidOf(name));
    return UserPrincipal(uid);
  }
  // The rest of the line is the name: a common name may have blanks in it.
  if ((absl::ConsumePrefix(&name, kCertificate) || absl::ConsumePrefix(&name, kToken)) &&
      !name.empty()) {
    return std::string(text);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      Quoted(text), " is not a principal; write cert:NAME, user:NAME, token:NAME or *"));
}

absl::Status ForEachLine(absl::string_view contents, const std::string& file,
                         const std::function<absl::Status(absl::string_view)>& add) {
  int number = 0;
  for (const absl::string_view each : absl::StrSplit(contents, '\n')) {
    ++number;
    const absl::string_view line = absl::StripAsciiWhitespace(each);
    if (line.empty() || line.front() == '#') continue;
    const absl::Status added = add(line);
    if (!added.ok()) return Annotate(added, absl::StrCat(file, ", line ", number));
  }
  return absl::OkStatus();
}

}  // namespace

TokenDigest DigestOf(absl::string_view token) {
  // It is computed for every call with a token. For random tokens, as `openssl rand -hex 32` makes
  // them, a plain digest is enough: nobody can try them all.
  TokenDigest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  return digest;
}

std::string CertificatePrincipal(absl::string_view common_name) {
  return absl::StrCat(kCertificate, common_name);
}
std::string UserPrincipal(uint32_t uid) { return absl::StrCat(kUser, uid); }
std::string TokenPrincipal(absl::string_view name) { return absl::StrCat(kToken, name); }

absl::StatusOr<Policy> Policy::Parse(absl::string_view roles, const std::string& roles_file,
                                     absl::string_view tokens, const std::string& tokens_file) {
  Policy policy;
  BALLAST_RETURN_IF_ERROR(
      ForEachLine(roles, roles_file, [&](absl::string_view line) { return policy.AddRole(line); }));
  BALLAST_RETURN_IF_ERROR(ForEachLine(
      tokens, tokens_file, [&](absl::string_view line) { return policy.AddToken(line); }));
  return policy;
}

absl::Status Policy::AddRole(absl::string_view line) {
  const absl::string_view name = TakeWord(line);
  // Not quoted: in a file that is given by mistake it may be a token.
  if (line.empty()) {
    return absl::InvalidArgumentError("expected ROLE JOBS PRINCIPAL, such as viewer * user:ann");
  }
  const std::optional<Role> role = ParseRole(name);
  if (!role.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown role ", Quoted(name), "; the roles are viewer, trainer, operator"));
  }
  const absl::string_view jobs = TakeWord(line);
  if (!IsJobPattern(jobs)) {
    return absl::InvalidArgumentError(
        absl::StrCat(Quoted(jobs), " is not a pattern of job names; write one such as gpt-* or *"));
  }
  BALLAST_ASSIGN_OR_RETURN(std::string principal, ParsePrincipal(line));
  roles_.push_back({.role = *role, .jobs = std::string(jobs), .principal = std::move(principal)});
  return absl::OkStatus();
}

absl::Status Policy::AddToken(absl::string_view line) {
  const absl::string_view name = TakeWord(line);
  // Nothing of the line is quoted: a token may stand in the place of the digits, or of the name, as
  // in a client's file, and is not to be in a log.
  const bool is_hex = std::all_of(line.begin(), line.end(), absl::ascii_isxdigit);
  if (line.size() != kDigestDigits || !is_hex) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected NAME and the token's SHA-256 of ", kDigestDigits,
                     " hexadecimal digits, not the token itself; make the digits with printf %s "
                     "\"$TOKEN\" | sha256sum"));
  }
  Token token = {.name = std::string(name), .digest = {}};
  const std::string bytes = absl::HexStringToBytes(line);
  std::copy(bytes.begin(), bytes.end(), token.digest.begin());
  // The recipe makes this of a variable that is not set, or of a file that is not there.
  if (token.digest == DigestOf("")) {
    return absl::InvalidArgumentError(
        absl::StrCat("token ", Quoted(name),
                     " is the SHA-256 of an empty token; make one with openssl rand -hex 32, and "
                     "its digest with printf %s \"$TOKEN\" | sha256sum"));
  }
  tokens_.push_back(std::move(token));
  return absl::OkStatus();
}

std::optional<std::string> Policy::TokenWith(const TokenDigest& digest) const {
  const Token* found = nullptr;
  // It does not end at the first that fits: the time must not tell which one that was.
  for (const Token& token : tokens_) {
    if (CRYPTO_memcmp(token.digest.data(), digest.data(), digest.size()) == 0) found = &token;
  }
  if (found == nullptr) return std::nullopt;
  return found->name;
}

Role Policy::Highest(absl::string_view principal,
                     const std::function<bool(const std::string& jobs)>& are_right) const {
  Role highest = Role::kNobody;
  // A * means every caller that is known, and one without a name is not.
  if (principal.empty()) return highest;
  for (const Line& line : roles_) {
    if (line.principal != principal && line.principal != kEverybody) continue;
    if (are_right(line.jobs)) highest = std::max(highest, line.role);
  }
  return highest;
}

Role Policy::RoleOf(absl::string_view principal, absl::string_view job) const {
  return Highest(principal, [name = std::string(job)](const std::string& jobs) {
    // Names of jobs have no slash, and no dot in front, so fnmatch needs no flag for those.
    return fnmatch(jobs.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
  });
}

Role Policy::RoleOfAll(absl::string_view principal) const {
  return Highest(principal, [](const std::string& jobs) { return jobs == kAllJobs; });
}

Role Policy::HighestRoleOf(absl::string_view principal) const {
  return Highest(principal, [](const std::string&) { return true; });
}

bool Policy::Names(absl::string_view principal) const {
  return std::any_of(roles_.begin(), roles_.end(),
                     [&](const Line& line) { return line.principal == principal; });
}

std::vector<std::string> Policy::MissingTokens() const {
  std::vector<std::string> missing;
  for (const Line& line : roles_) {
    absl::string_view name = line.principal;
    if (!absl::ConsumePrefix(&name, kToken)) continue;
    const bool is_there = std::any_of(tokens_.begin(), tokens_.end(),
                                      [&](const Token& token) { return token.name == name; });
    if (!is_there) missing.emplace_back(name);
  }
  return missing;
}

}  // namespace ballast::server
