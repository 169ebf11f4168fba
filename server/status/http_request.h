// What an HTTP request says: its first line and its headers. Bodies are not read.
#ifndef BALLAST_SERVER_STATUS_HTTP_REQUEST_H_
#define BALLAST_SERVER_STATUS_HTTP_REQUEST_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::server {

inline constexpr size_t kMostHeadBytes = 16384;

struct HttpRequest {
  std::string method;
  std::string path;                          // Decoded, without the query.
  std::map<std::string, std::string> query;  // Decoded; of a name that comes twice, the first.
  std::optional<std::string> host;           // The headers of these names, if there are any.
  std::string authorization;
  std::string peer;  // Its address, as gRPC names it.
  // In the certificate that the peer has shown, and that the service trusts; nullopt: there is none.
  std::optional<std::string> certificate_name;

  // Empty if the query has none of this name.
  std::string Get(const std::string& name) const;
};

// The bytes of the head that `text` begins with, up to and with its empty line; 0: it has not all
// come.
size_t HeadBytes(absl::string_view text);

// Parses a head. INVALID_ARGUMENT: it is none of HTTP/1.0 or 1.1, or one of 1.1 without a host.
absl::StatusOr<HttpRequest> ParseHead(absl::string_view head);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_HTTP_REQUEST_H_
