// A connection of HTTP's, plain or with TLS. All of it ends at a time that is given beforehand,
// however slow the peer is.
#ifndef BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_
#define BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_

#include <openssl/types.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "server/access/access_options.h"

namespace ballast::server {

// The service's certificate and key, and whose certificates clients may show. Immutable.
using HttpTls = std::shared_ptr<SSL_CTX>;

// Null where there is no certificate. INVALID_ARGUMENT, in one line, for files that are missing or
// wrong. Clients may show a certificate and need not: probes have none.
absl::StatusOr<HttpTls> ReadHttpTls(const AccessOptions& options);

// Not thread-safe.
class HttpConnection {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Of a socket that does not block. `tls` null: nothing is encrypted.
  HttpConnection(FileDescriptor socket, HttpTls tls);
  ~HttpConnection();

  // Before anything else: TLS's handshake, if there is TLS. DEADLINE_EXCEEDED: the peer is too slow.
  // FAILED_PRECONDITION: it speaks HTTP without TLS, and so does this connection now, so that it can
  // be told. UNAUTHENTICATED: it has ended, or takes or shows no certificate that will do.
  absl::Status Open(Deadline deadline);

  // Some bytes of the peer's; 0: it has ended.
  absl::StatusOr<size_t> Read(char* buffer, size_t bytes, Deadline deadline);
  absl::Status Write(absl::string_view text, Deadline deadline);

  // Tells the peer that this is the end, and waits for its end, so that it reads all that was
  // written.
  void Close(Deadline deadline);

  std::string peer() const;  // Its address.
  // The common name of the certificate that it has shown, or the first of its other names where it
  // has none, as for gRPC's connections; empty: that has none that fits into a line. nullopt: it has
  // shown none.
  std::optional<std::string> certificate_name() const;

 private:
  // What a peer may send in all, its handshake included.
  static constexpr size_t kMostBytes = size_t{256} << 10;

  // How much longer TLS may read from the socket. It goes on within one call for as long as records
  // come that are not data, of which a peer may send any number.
  struct Limit {
    Deadline deadline;
    size_t bytes_left = kMostBytes;
    bool is_over() const { return bytes_left == 0 || std::chrono::steady_clock::now() >= deadline; }
  };

  void LimitReads();  // Of the session's socket, by the limit.
  // Whether the socket has become ready.
  bool Await(short events, Deadline deadline) const;  // NOLINT: poll's type.
  // After an operation of TLS that returned `result`: OK if it is to be tried again.
  absl::Status AwaitTls(int result, Deadline deadline) const;

  FileDescriptor socket_;
  HttpTls tls_;
  SSL* session_ = nullptr;
  Limit limit_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_
