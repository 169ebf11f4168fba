#include "client/credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <cstdlib>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {
namespace {

// How often gRPC looks at the files of TLS.
constexpr unsigned int kReadEverySeconds = 1;

void OrVariable(const char* name, std::string& value) {
  const char* const found = std::getenv(name);
  if (value.empty() && found != nullptr) value = found;
}

// Sends a file's token with each call; the last good one while the file has none. Thread-safe.
class TokenSender final : public grpc::MetadataCredentialsPlugin {
 public:
  TokenSender(std::string file, std::string token)
      : file_(std::move(file)), token_(std::move(token)) {}

  // Otherwise gRPC would call this on another thread; to read a small file takes a moment.
  bool IsBlocking() const override { return false; }
  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<grpc::string, grpc::string>* metadata) override {
    absl::StatusOr<std::string> read = ReadTokenFile(file_);
    MutexLock lock(mutex_);
    if (read.ok()) token_ = *std::move(read);
    metadata->emplace("authorization", "Bearer " + token_);
    return grpc::Status::OK;
  }
  grpc::string DebugString() override { return "TokenSender of " + file_; }

 private:
  const std::string file_;
  Mutex mutex_;
  std::string token_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeTlsCredentials(
    const Credentials& credentials) {
  // Read here only for the error, which names the file. gRPC's provider, which reads it again, only
  // logs what is wrong, and then each connection fails.
  BALLAST_RETURN_IF_ERROR(ReadCertificateAuthority(credentials.tls_ca).status());
  if (!credentials.tls_cert.empty()) {
    BALLAST_RETURN_IF_ERROR(ReadKeyPair(credentials.tls_cert, credentials.tls_key).status());
  }
  grpc::experimental::TlsChannelCredentialsOptions tls;
  tls.set_certificate_provider(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      credentials.tls_key, credentials.tls_cert, credentials.tls_ca, kReadEverySeconds));
  tls.watch_root_certs();
  if (!credentials.tls_cert.empty()) tls.watch_identity_key_cert_pairs();
  tls.set_certificate_verifier(std::make_shared<grpc::experimental::HostNameCertificateVerifier>());
  return grpc::experimental::TlsCredentials(tls);
}

}  // namespace

Credentials OrEnvironment(Credentials given) {
  OrVariable("BALLAST_TLS_CA", given.tls_ca);
  OrVariable("BALLAST_TLS_CERT", given.tls_cert);
  OrVariable("BALLAST_TLS_KEY", given.tls_key);
  OrVariable("BALLAST_TOKEN_FILE", given.token_file);
  return given;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const std::string& target, const Credentials& credentials) {
  const bool is_unix = absl::StartsWith(target, "unix:");
  if (credentials.tls_cert.empty() != credentials.tls_key.empty()) {
    return absl::InvalidArgumentError(
        "a certificate and its key belong together: give both --tls-cert and --tls-key");
  }
  if (!credentials.tls_cert.empty() && credentials.tls_ca.empty()) {
    return absl::InvalidArgumentError(
        "--tls-cert needs TLS: give with --tls-ca the authority that signed the service's "
        "certificate");
  }
  std::shared_ptr<grpc::ChannelCredentials> channel;
  if (!is_unix && !credentials.tls_ca.empty()) {
    BALLAST_ASSIGN_OR_RETURN(channel, MakeTlsCredentials(credentials));
  }
  if (credentials.token_file.empty()) {
    return channel != nullptr ? channel : grpc::InsecureChannelCredentials();
  }
  // Over plain TCP anybody on the way could read the token, and use it.
  if (channel == nullptr && !is_unix) {
    return absl::InvalidArgumentError(
        absl::StrCat("a token is sent only over TLS or a unix socket, and ", target,
                     " is neither: give --tls-ca, or leave out --token-file"));
  }
  BALLAST_ASSIGN_OR_RETURN(std::string token, ReadTokenFile(credentials.token_file));
  // gRPC sends a call's credentials only on a channel that it counts as secure. An insecure one is
  // not; one with the credentials of a local unix socket is.
  if (channel == nullptr) channel = grpc::experimental::LocalCredentials(UDS);
  return grpc::CompositeChannelCredentials(
      channel, grpc::MetadataCredentialsFromPlugin(
                   std::make_unique<TokenSender>(credentials.token_file, std::move(token))));
}

}  // namespace ballast::client
