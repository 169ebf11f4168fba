// An HTTP connection, plain or with TLS, with time limits for its peer.
#ifndef BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_
#define BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_

#include <openssl/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "server/access/access_options.h"

namespace ballast::server {

// The service's certificate and key, and the authorities of clients' certificates. Immutable.
using HttpTls = std::shared_ptr<SSL_CTX>;

// Null without a certificate. INVALID_ARGUMENT, in one line, for files that are missing or wrong.
// Clients' certificates are optional, because probes have none.
absl::StatusOr<HttpTls> ReadHttpTls(const AccessOptions& options);

// The common name of the peer's certificate, or its first alternative name, as in gRPC's
// connections. Empty: the certificate has no name that fits into a line. nullopt: the peer has
// shown no certificate. `session` may be null.
std::optional<std::string> CertificateName(const SSL* session);

// Not thread-safe. Each call blocks until the peer has acted, or its time is over.
class HttpConnection {
 public:
  // Whether others wait for this thread: then the peer has less time.
  using IsHurried = std::function<bool()>;

  // The socket does not block. `tls` null: no encryption.
  HttpConnection(FileDescriptor socket, const HttpTls& tls, IsHurried is_hurried);

  // The head of a request, including its empty line, or a prefix that is too long for one. The TLS
  // handshake comes first. nullopt: the peer has not sent that much in time.
  std::optional<std::string> ReadHead();
  // False: the peer has not read it in time.
  bool Write(absl::string_view text);
  // Tells the peer that the connection ends.
  void End();

  std::string peer() const;                              // gRPC's name for it.
  const SSL* session() const { return session_.get(); }  // Null: plain.

 private:
  bool Handshake();
  // Repeats `operation`, as SSL_read, until it returns a positive value. False: it fails.
  bool Try(short events, absl::FunctionRef<int()> operation);  // NOLINT: poll's type.
  bool Await(short events) const;                              // NOLINT

  FileDescriptor socket_;
  std::unique_ptr<SSL, void (*)(SSL*)> session_;
  const IsHurried is_hurried_;
  std::chrono::steady_clock::time_point begun_;  // Begin of the peer's current action.
  std::chrono::milliseconds patience_{};         // For that action.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_
