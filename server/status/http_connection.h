// A connection of HTTP's, plain or with TLS, none of whose operations waits.
#ifndef BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_
#define BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_

#include <openssl/types.h>

#include <cstddef>
#include <cstdint>
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
  // The socket does not block. `tls` null: nothing is encrypted.
  HttpConnection(FileDescriptor socket, HttpTls tls);
  ~HttpConnection();

  // What an operation waits for before it can go on, if it is called again.
  enum class Needs : uint8_t { kNothing, kRead, kWrite };
  struct Moved {
    Needs needs = Needs::kNothing;
    size_t bytes = 0;  // With kNothing. 0 of Read: the peer has ended.
  };

  // Before anything else: TLS's handshake, if there is TLS. FAILED_PRECONDITION: the peer speaks HTTP
  // without TLS, and so does this connection now, so that it can say so. UNAUTHENTICATED: it has
  // ended, or takes or shows no certificate that will do. RESOURCE_EXHAUSTED: it sends too much.
  absl::StatusOr<Needs> Open();

  // Some bytes of the peer's, or to it. Errors: the connection is of no more use.
  absl::StatusOr<Moved> Read(char* buffer, size_t bytes);
  absl::StatusOr<Moved> Write(absl::string_view text);

  // Tells the peer that this is the end.
  void End();
  // Then: takes what it still sends, so that it reads all that was written. kRead: it has not ended.
  Needs Discard();

  std::string peer() const;  // As gRPC names it: "ipv4:127.0.0.1:50051".
  // The common name of the certificate that it has shown, or the first of its other names where it
  // has none, as for gRPC's connections; empty: that has none that fits into a line. nullopt: it has
  // shown none.
  std::optional<std::string> certificate_name() const;

  int socket() const { return socket_.number(); }

 private:
  // What a peer may send in all, its handshake included. TLS goes on within one call for as long as
  // records come that are not data, of which a peer may send any number.
  static constexpr size_t kMostBytes = size_t{256} << 10;

  void LimitReads();  // Of the session's socket.
  // After an operation of TLS that returned `result`: what it needs to be tried again.
  absl::StatusOr<Needs> NeedsOfTls(int result) const;

  FileDescriptor socket_;
  HttpTls tls_;
  SSL* session_ = nullptr;
  size_t bytes_left_ = kMostBytes;  // Of TLS.
  size_t discarded_ = 0;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_HTTP_CONNECTION_H_
