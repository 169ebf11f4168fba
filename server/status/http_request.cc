#include "server/status/http_request.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::server {
namespace {

// A lone line feed ends no line here; a server may take it, and need not (RFC 9112, 2.2).
constexpr absl::string_view kEndOfHead = "\r\n\r\n";

// Letters, digits and signs, as names of methods and headers have them.
// RFC 9110, 5.6.2.
bool IsToken(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return absl::ascii_isgraph(c) && !absl::StrContains("\"(),/:;<=>?@[\\]{}", char(c));
  });
}

// %41 is A. In a query + is a blank.
absl::StatusOr<std::string> Decode(absl::string_view text, bool is_query) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+' && is_query) {
      decoded += ' ';
    } else if (text[i] != '%') {
      decoded += text[i];
    } else {
      const absl::string_view digits = text.substr(i + 1, 2);
      if (digits.size() != 2 || !absl::ascii_isxdigit(static_cast<unsigned char>(digits[0])) ||
          !absl::ascii_isxdigit(static_cast<unsigned char>(digits[1]))) {
        return absl::InvalidArgumentError("a % is not followed by two hexadecimal digits");
      }
      decoded += absl::HexStringToBytes(digits);
      i += 2;
    }
  }
  return decoded;
}

absl::Status ParseTarget(absl::string_view target, HttpRequest& request) {
  // A proxy is asked with the whole URL.
  if (absl::StartsWithIgnoreCase(target, "http://") ||
      absl::StartsWithIgnoreCase(target, "https://")) {
    target.remove_prefix(target.find("//") + 2);
    target.remove_prefix(std::min(target.find('/'), target.size()));
  }
  if (!absl::StartsWith(target, "/")) return absl::InvalidArgumentError("the path has no / first");
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(target, absl::MaxSplits('?', 1));
  BALLAST_ASSIGN_OR_RETURN(request.path, Decode(parts.first, /*is_query=*/false));
  for (const absl::string_view part : absl::StrSplit(parts.second, '&', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    BALLAST_ASSIGN_OR_RETURN(std::string name, Decode(pair.first, /*is_query=*/true));
    BALLAST_ASSIGN_OR_RETURN(std::string value, Decode(pair.second, /*is_query=*/true));
    request.query.emplace(std::move(name), std::move(value));
  }
  return absl::OkStatus();
}

absl::Status ParseHeader(absl::string_view line, HttpRequest& request) {
  const std::pair<absl::string_view, absl::string_view> pair =
      absl::StrSplit(line, absl::MaxSplits(':', 1));
  const bool has_control = std::any_of(pair.second.begin(), pair.second.end(), [](unsigned char c) {
    return absl::ascii_iscntrl(c) && c != '\t';
  });
  // IsToken also refuses a blank before the colon and a line that goes on the one before: proxies
  // read those differently (RFC 9112, 5).
  if (!IsToken(pair.first) || pair.first.size() == line.size() || has_control) {
    return absl::InvalidArgumentError("a header is not NAME: VALUE");
  }
  const std::string value(absl::StripAsciiWhitespace(pair.second));
  if (absl::EqualsIgnoreCase(pair.first, "host")) {
    // An error (RFC 9112, 3.2): HttpServer checks one name, and a proxy might go by the other.
    if (request.host.has_value()) return absl::InvalidArgumentError("there are two hosts");
    request.host = value;
  } else if (absl::EqualsIgnoreCase(pair.first, "authorization")) {
    if (!request.authorization.empty()) {
      return absl::InvalidArgumentError("there are two authorizations");
    }
    request.authorization = value;
  }
  return absl::OkStatus();
}

}  // namespace

std::string HttpRequest::Get(const std::string& name) const {
  const auto found = query.find(name);
  return found == query.end() ? std::string() : found->second;
}

size_t HeadBytes(absl::string_view text) {
  const size_t end = text.find(kEndOfHead);
  return end == absl::string_view::npos ? 0 : end + kEndOfHead.size();
}

absl::StatusOr<HttpRequest> ParseHead(absl::string_view head) {
  HttpRequest request;
  if (!absl::ConsumeSuffix(&head, kEndOfHead)) return absl::InvalidArgumentError("no end");
  const std::vector<absl::string_view> lines = absl::StrSplit(head, "\r\n");
  const std::vector<absl::string_view> words = absl::StrSplit(lines.front(), ' ');
  if (words.size() != 3 || !IsToken(words[0]) ||
      (words[2] != "HTTP/1.1" && words[2] != "HTTP/1.0")) {
    return absl::InvalidArgumentError("the first line is not METHOD PATH HTTP/1.1");
  }
  request.method = std::string(words[0]);
  BALLAST_RETURN_IF_ERROR(ParseTarget(words[1], request));
  for (size_t i = 1; i < lines.size(); ++i) {
    BALLAST_RETURN_IF_ERROR(ParseHeader(lines[i], request));
  }
  if (words[2] == "HTTP/1.1" && !request.host.has_value()) {
    return absl::InvalidArgumentError("there is no host, which HTTP/1.1 wants");
  }
  return request;
}

}  // namespace ballast::server
