#include "client/transport/handshake.h"

#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <signal.h>

#include <chrono>
#include <ctime>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/transport/steady_deadline.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

// For a handshake of a process that gets little of the processor.
constexpr absl::Duration kHandshakeLimit = absl::Seconds(5);

// OpenSSL writes to a socket whose peer may have closed it, and the program's way with SIGPIPE is
// its own.
class WithoutSigPipe {
 public:
  WithoutSigPipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    // One that is pending already is the program's own, and stays.
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutSigPipe() {
    // A signal of a write in between is taken before the old mask would let it through.
    const timespec now = {};
    if (!was_pending_) sigtimedwait(&pipe_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSigPipe(const WithoutSigPipe&) = delete;
  WithoutSigPipe& operator=(const WithoutSigPipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_ = false;
};

std::string NeedsCertificate() {
  return "it requires a client certificate; give --tls-cert and --tls-key";
}

std::string NotOfItsAuthority(const Credentials& credentials) {
  return absl::StrCat("it does not trust the authority that signed this client's certificate, ",
                      credentials.tls_cert,
                      "; give one signed by an authority in its --tls-client-ca");
}

// What gRPC and OpenSSL say.
std::string Meaning(absl::string_view words, const Credentials& credentials) {
  const auto said = [&](absl::string_view part) { return absl::StrContains(words, part); };
  if (said("certificate verify failed")) {
    return absl::StrCat("its certificate has expired or is not signed by the authority in ",
                        credentials.tls_ca, "; give the authority that signed it with --tls-ca");
  }
  if (said("Hostname Verification")) {
    return absl::StrCat(
        "its certificate, signed by the authority in ", credentials.tls_ca,
        ", is for another host name; use a host name that the certificate contains");
  }
  if (said("wrong version number")) {
    return absl::StrCat("what listens there does not speak TLS; leave out --tls-ca (",
                        credentials.tls_ca, "), or correct the address");
  }
  if (said("alert certificate required")) return NeedsCertificate();
  // The rest is about this client's certificate.
  if (credentials.tls_cert.empty()) return "";
  if (said("alert certificate expired")) {
    return absl::StrCat("this client's certificate, ", credentials.tls_cert,
                        ", has expired; renew it");
  }
  if (said("alert unsupported certificate")) {
    return absl::StrCat("this client's certificate, ", credentials.tls_cert,
                        ", is not for clients; give one with clientAuth in its extended key usage");
  }
  if (said("alert unknown ca") || said("alert decrypt error"))
    return NotOfItsAuthority(credentials);
  return "";
}

// A handshake with OpenSSL alone, which tells what gRPC does not.
class Handshake {
 public:
  // With `address`, which gRPC has found behind the target: to resolve a name takes as long as it
  // takes.
  Handshake(const std::string& address, const std::string& target, const Credentials& credentials)
      : credentials_(credentials), context_(SSL_CTX_new(TLS_client_method()), SSL_CTX_free) {
    // OpenSSL's errors are the thread's: what other code has left there would mislead.
    ERR_clear_error();
    if (context_ == nullptr || !UseFiles()) return;
    SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER, nullptr);
    // The authority in tls_ca may be one that another authority has signed.
    X509_STORE_set_flags(SSL_CTX_get_cert_store(context_.get()), X509_V_FLAG_PARTIAL_CHAIN);
    SSL_CTX_set_cert_cb(
        context_.get(),
        [](SSL*, void* asked) {
          *static_cast<bool*>(asked) = true;
          return 1;
        },
        &asked_);
    // A gRPC server closes a connection on which ALPN has not agreed on HTTP/2.
    static constexpr unsigned char kHttp2[] = {2, 'h', '2'};
    SSL_CTX_set_alpn_protos(context_.get(), kHttp2, sizeof(kHttp2));
    connection_.reset(BIO_new_ssl_connect(context_.get()));
    if (connection_ == nullptr || BIO_get_ssl(connection_.get(), &session_) <= 0) return;
    // Its end writes nothing: to a connection that was reset that would be a SIGPIPE.
    SSL_set_quiet_shutdown(session_, 1);
    BIO_set_nbio(connection_.get(), 1);
    BIO_set_conn_hostname(connection_.get(), address.c_str());
    // A number, also one of IPv6, "[::1]", is not told.
    const std::string host = target.substr(0, target.rfind(':'));
    in_addr number;
    if (host.front() != '[' && inet_pton(AF_INET, host.c_str(), &number) != 1) {
      SSL_set_tlsext_host_name(session_, host.c_str());
    }
  }
  ~Handshake() { ERR_clear_error(); }

  std::string WhyRefused(std::chrono::steady_clock::time_point deadline) {
    const WithoutSigPipe without_signal;
    if (session_ == nullptr) return "";
    if (!Do([&] { return BIO_do_handshake(connection_.get()); }, deadline)) return WhatWasSaid();
    // A refusal may come only now (TLS 1.3). A service that admits this client sends HTTP/2's
    // SETTINGS first of all (RFC 9113, 3.4).
    char byte = 0;
    const bool admitted = Do([&] { return BIO_read(connection_.get(), &byte, 1); }, deadline);
    if (admitted || is_late_) return "";
    const std::string why = WhatWasSaid();
    if (!why.empty() || !asked_) return why;
    // A service that asks for a certificate may take a token instead.
    if (credentials_.tls_cert.empty()) {
      return credentials_.token_file.empty() ? NeedsCertificate() : "";
    }
    return HasNamedAuthority() ? "" : NotOfItsAuthority(credentials_);
  }

 private:
  // False: a file is just now not what it was, so nothing is certain.
  bool UseFiles() {
    if (SSL_CTX_load_verify_file(context_.get(), credentials_.tls_ca.c_str()) != 1) return false;
    if (credentials_.tls_cert.empty()) return true;
    return SSL_CTX_use_certificate_chain_file(context_.get(), credentials_.tls_cert.c_str()) == 1 &&
           SSL_CTX_use_PrivateKey_file(context_.get(), credentials_.tls_key.c_str(),
                                       SSL_FILETYPE_PEM) == 1;
  }

  template <typename Operation>
  bool Do(Operation operation, std::chrono::steady_clock::time_point deadline) {
    while (operation() <= 0) {
      if (!BIO_should_retry(connection_.get())) return false;
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      const auto events = static_cast<short>(  // NOLINT: the system's type.
          BIO_should_read(connection_.get()) ? POLLIN : POLLOUT);
      pollfd socket = {.fd = -1, .events = events, .revents = 0};
      BIO_get_fd(connection_.get(), &socket.fd);
      is_late_ = left.count() <= 0;
      if (is_late_) return false;
      poll(&socket, 1, static_cast<int>(left.count()));
    }
    return true;
  }

  // By the service: that this side trusts it is for gRPC to say.
  std::string WhatWasSaid() const {
    const char* const words = ERR_reason_error_string(ERR_peek_error());
    if (words == nullptr || !absl::StrContains(words, "alert")) return "";
    return Meaning(words, credentials_);
  }

  // Whether a certificate that the client shows is of an authority that the service takes. One that
  // names none takes all.
  bool HasNamedAuthority() const {
    const STACK_OF(X509_NAME)* const names = SSL_get0_peer_CA_list(session_);
    if (sk_X509_NAME_num(names) <= 0) return true;
    const auto is_named = [&](const X509* shown) {
      for (int i = 0; i < sk_X509_NAME_num(names); ++i) {
        if (X509_NAME_cmp(sk_X509_NAME_value(names, i), X509_get_issuer_name(shown)) == 0) {
          return true;
        }
      }
      return false;
    };
    if (is_named(SSL_get_certificate(session_))) return true;
    STACK_OF(X509)* chain = nullptr;
    SSL_CTX_get0_chain_certs(context_.get(), &chain);
    for (int i = 0; i < sk_X509_num(chain); ++i) {
      if (is_named(sk_X509_value(chain, i))) return true;
    }
    return false;
  }

  const Credentials& credentials_;
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  std::unique_ptr<BIO, decltype(&BIO_free_all)> connection_{nullptr, BIO_free_all};
  SSL* session_ = nullptr;  // Of the connection.
  bool asked_ = false;      // For a certificate of this client.
  bool is_late_ = false;
};

}  // namespace

std::string WhyHandshakeFailed(const grpc::Status& status, const std::string& target,
                               const Credentials& credentials) {
  // What the service itself says has details. The rest are gRPC's words, and OpenSSL's in them.
  if (status.ok() || !status.error_details().empty()) return "";
  const std::string why = Meaning(status.error_message(), credentials);
  const auto said = [&](const char* words) {
    return absl::StrContains(status.error_message(), words);
  };
  const bool was_closed = said("Socket closed") || said("Connection reset") || said("Broken pipe");
  const std::string address = proto::AddressTried(status);
  if (!why.empty() || !was_closed || credentials.tls_ca.empty() || address.empty() ||
      absl::StartsWith(target, "unix:")) {
    return why;
  }
  // Twice: a service may die just after a handshake, but the next one does not.
  const auto deadline = SteadyDeadline(kHandshakeLimit);
  const auto why_refused = [&] {
    return Handshake(address, target, credentials).WhyRefused(deadline);
  };
  const std::string first = why_refused();
  return first.empty() || why_refused() == first ? first : "";
}

}  // namespace ballast::client
