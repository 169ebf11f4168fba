#include "server/access/tls.h"

#include <fcntl.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/system/credential_files.h"

namespace ballast::server {
namespace {

// How often gRPC reads the copies again. A FileWatch looks at the files themselves.
constexpr unsigned int kReadEverySeconds = 1;

// Where another reader of this process finds the file.
std::string PathOf(const FileDescriptor& file) {
  // Whoever opens this path gets an offset of their own, and reads from the beginning.
  return file ? absl::StrCat("/proc/self/fd/", file.number()) : std::string();
}

// Makes `file` a new one with these contents. Its path stays: a reader finds the old file or the
// new one, whole.
absl::Status Replace(const std::string& contents, FileDescriptor& file) {
  FileDescriptor made(memfd_create("ballast-tls", MFD_CLOEXEC));
  if (!made) return absl::ErrnoToStatus(errno, "cannot keep a certificate in memory");
  BALLAST_RETURN_IF_ERROR(
      WriteAll(made.number(), "the copy of a certificate or key in memory", contents));
  if (!file) {
    file = std::move(made);
  } else if (dup3(made.number(), file.number(), O_CLOEXEC) < 0) {
    return absl::ErrnoToStatus(errno, "cannot keep a certificate in memory");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tls>> Tls::Open(const AccessOptions& options) {
  if (options.tls_certificate.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError(
        "TLS needs a certificate and its key: give both --tls-cert and --tls-key");
  }
  if (!options.tls_client_ca.empty() && options.tls_certificate.empty()) {
    return absl::InvalidArgumentError(
        "--tls-client-ca needs TLS: give --tls-cert and --tls-key as well");
  }
  auto tls = std::unique_ptr<Tls>(new Tls(options));
  BALLAST_RETURN_IF_ERROR(tls->ReadAgain());
  return tls;
}

absl::Status Tls::ReadAgain() {
  if (!on()) return absl::OkStatus();
  // All files are read and checked before the first copy is replaced: one that is wrong changes
  // nothing.
  BALLAST_ASSIGN_OR_RETURN(const KeyPair pair,
                           ReadKeyPair(options_.tls_certificate, options_.tls_key));
  if (!options_.tls_client_ca.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const std::string client_ca,
                             ReadCertificateAuthority(options_.tls_client_ca));
    BALLAST_RETURN_IF_ERROR(Replace(client_ca, client_ca_));
  }
  BALLAST_RETURN_IF_ERROR(Replace(pair.key, key_));
  BALLAST_RETURN_IF_ERROR(Replace(pair.certificate, certificate_));
  expires_unix_seconds_ = pair.expires_unix_seconds;
  return absl::OkStatus();
}

std::shared_ptr<grpc::ServerCredentials> Tls::credentials() const {
  if (!on()) return grpc::InsecureServerCredentials();
  grpc::experimental::TlsServerCredentialsOptions tls(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          PathOf(key_), PathOf(certificate_), PathOf(client_ca_), kReadEverySeconds));
  tls.watch_identity_key_cert_pairs();
  if (!client_ca_) {
    tls.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    tls.watch_root_certs();
    // A client with a token needs no certificate.
    tls.set_cert_request_type(options_.tokens.empty()
                                  ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                  : GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(tls);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Tls::channel_credentials() const {
  if (!on()) return grpc::InsecureChannelCredentials();
  if (!client_ca_) {
    return absl::FailedPreconditionError(
        "a service with TLS connects to other members only with --tls-client-ca, the authority of "
        "their certificates");
  }
  grpc::experimental::TlsChannelCredentialsOptions tls;
  tls.set_certificate_provider(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          PathOf(key_), PathOf(certificate_), PathOf(client_ca_), kReadEverySeconds));
  tls.watch_identity_key_cert_pairs();
  tls.watch_root_certs();
  return grpc::experimental::TlsCredentials(tls);
}

}  // namespace ballast::server
