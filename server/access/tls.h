// TLS of the service's TCP connections.
#ifndef BALLAST_SERVER_ACCESS_TLS_H_
#define BALLAST_SERVER_ACCESS_TLS_H_

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "server/access/access_options.h"

namespace ballast::server {

// gRPC reads a certificate's files every second and takes what it finds. With a new certificate and
// an old key it would refuse all connections. So it gets copies in memory of files that were
// checked together. Not thread-safe.
class Tls {
 public:
  // INVALID_ARGUMENT, in one line, for files that are missing or wrong. Without a certificate there
  // is no encryption.
  static absl::StatusOr<std::unique_ptr<Tls>> Open(const AccessOptions& options);

  // For TLS 1.2 and later.
  std::shared_ptr<grpc::ServerCredentials> credentials() const;
  // For connections to other members of a job: with the service's own certificate, to services whose
  // certificates are signed by the authorities of clients. FAILED_PRECONDITION: there is a
  // certificate, and no such authority.
  absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> channel_credentials() const;

  // New connections use the files' current contents. Returns an error, and then keeps the old
  // contents.
  absl::Status ReadAgain();

  // When the current certificate expires; 0: no certificate. From any thread.
  int64_t expires_unix_seconds() const { return expires_unix_seconds_; }

 private:
  explicit Tls(const AccessOptions& options) : options_(options) {}
  bool on() const { return !options_.tls_certificate.empty(); }

  const AccessOptions options_;
  FileDescriptor certificate_;
  FileDescriptor key_;
  FileDescriptor client_ca_;
  std::atomic<int64_t> expires_unix_seconds_ = 0;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_TLS_H_
