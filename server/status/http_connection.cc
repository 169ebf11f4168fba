#include "server/status/http_connection.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/sslerr.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "server/listener.h"

namespace ballast::server {
namespace {

constexpr size_t kMostDiscardedBytes = size_t{1} << 20;

using Bytes = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

Bytes BytesOf(const std::string& text) {
  return {BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), BIO_free};
}

// nullptr: there is no further one.
Certificate NextIn(const Bytes& bytes) {
  return {PEM_read_bio_X509(bytes.get(), nullptr, nullptr, nullptr), X509_free};
}

std::string InUtf8(const ASN1_STRING* text) {
  unsigned char* bytes = nullptr;
  const int size = ASN1_STRING_to_UTF8(&bytes, text);
  if (size < 0) return "";
  std::string copy(reinterpret_cast<const char*>(bytes), static_cast<size_t>(size));
  OPENSSL_free(bytes);
  return copy;
}

std::string CommonName(const X509* certificate) {
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  return at < 0 ? "" : InUtf8(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
}

// Of a host, a user or a resource.
std::string FirstOtherName(const X509* certificate) {
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> names(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)),
      GENERAL_NAMES_free);
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    int type = 0;
    const void* const value = GENERAL_NAME_get0_value(sk_GENERAL_NAME_value(names.get(), i), &type);
    if (type == GEN_DNS || type == GEN_URI || type == GEN_EMAIL) {
      return InUtf8(static_cast<const ASN1_STRING*>(value));
    }
  }
  return "";
}

std::string LastTlsError() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "the peer has ended the connection" : reason;
}

// The two have been checked: they are there, and belong together.
bool Use(SSL_CTX* tls, const KeyPair& pair) {
  const Bytes chain = BytesOf(pair.certificate);
  const Bytes secret = BytesOf(pair.key);
  const Certificate own = NextIn(chain);
  const auto no_passphrase = [](char*, int, int, void*) {
    return -1;
  };  // There is no person to ask for one.
  const Key key(PEM_read_bio_PrivateKey(secret.get(), nullptr, no_passphrase, nullptr),
                EVP_PKEY_free);
  if (own == nullptr || key == nullptr || SSL_CTX_use_certificate(tls, own.get()) != 1 ||
      SSL_CTX_use_PrivateKey(tls, key.get()) != 1) {
    return false;
  }
  while (const Certificate next = NextIn(chain)) {
    if (SSL_CTX_add1_chain_cert(tls, next.get()) != 1) return false;
  }
  ERR_clear_error();  // The last one was not there.
  return true;
}

bool TrustClientsOf(SSL_CTX* tls, const std::string& authorities) {
  const Bytes bytes = BytesOf(authorities);
  while (const Certificate next = NextIn(bytes)) {
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(tls), next.get()) != 1) return false;
    // The client is sent these names, and chooses its certificate by them.
    SSL_CTX_add_client_CA(tls, next.get());
  }
  ERR_clear_error();
  // Asks for a certificate; without SSL_VERIFY_FAIL_IF_NO_PEER_CERT there need be none.
  SSL_CTX_set_verify(tls, SSL_VERIFY_PEER, nullptr);
  // An authority that another has signed is enough, as for gRPC's connections.
  X509_STORE_set_flags(SSL_CTX_get_cert_store(tls), X509_V_FLAG_PARTIAL_CHAIN);
  return true;
}

}  // namespace

absl::StatusOr<HttpTls> ReadHttpTls(const AccessOptions& options) {
  if (options.tls_certificate.empty()) return nullptr;
  BALLAST_ASSIGN_OR_RETURN(const KeyPair pair,
                           ReadKeyPair(options.tls_certificate, options.tls_key));
  HttpTls tls(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  if (tls == nullptr || SSL_CTX_set_min_proto_version(tls.get(), TLS1_2_VERSION) != 1) {
    return absl::InternalError("OpenSSL cannot be set up: " + LastTlsError());
  }
  // Each connection has one request, and what a session had been shown may have been revoked.
  SSL_CTX_set_session_cache_mode(tls.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(tls.get(), 0);
  SSL_CTX_set_options(tls.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  // Otherwise a Write would have to take all of its text, and be repeated with the very same one.
  SSL_CTX_set_mode(tls.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  if (!Use(tls.get(), pair)) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.tls_certificate, " cannot be used: ", LastTlsError()));
  }
  if (options.tls_client_ca.empty()) return tls;
  BALLAST_ASSIGN_OR_RETURN(const std::string authorities,
                           ReadCertificateAuthority(options.tls_client_ca));
  if (TrustClientsOf(tls.get(), authorities)) return tls;
  return absl::InvalidArgumentError(
      absl::StrCat(options.tls_client_ca, " cannot be used: ", LastTlsError()));
}

HttpConnection::HttpConnection(FileDescriptor socket, HttpTls tls)
    : socket_(std::move(socket)), tls_(std::move(tls)) {}

HttpConnection::~HttpConnection() { SSL_free(session_); }

void HttpConnection::LimitReads() {
  BIO* const reads = SSL_get_rbio(session_);
  BIO_set_callback_arg(reads, reinterpret_cast<char*>(&bytes_left_));
  // OpenSSL calls it before each operation, with 1 as the result, and after it, with the
  // operation's own. The same BIO writes, too: what is no read passes as it is.
  BIO_set_callback_ex(
      reads,
      [](BIO* bio, int operation, const char*, size_t, int, long,  // NOLINT
         int result, size_t* bytes) -> long {                      // NOLINT
        auto& left = *reinterpret_cast<size_t*>(BIO_get_callback_arg(bio));
        if (operation == BIO_CB_READ && left == 0) return -1;
        if (operation == (BIO_CB_READ | BIO_CB_RETURN) && result > 0 && bytes != nullptr) {
          left -= std::min(left, *bytes);
        }
        return operation == BIO_CB_READ ? 1 : result;
      });
}

absl::StatusOr<HttpConnection::Needs> HttpConnection::NeedsOfTls(int result) const {
  const int why = SSL_get_error(session_, result);
  // Asked before the others, because OpenSSL does not know why LimitReads refused it a read.
  if (bytes_left_ == 0) return absl::ResourceExhaustedError("the peer sends too much");
  if (why == SSL_ERROR_WANT_READ) return Needs::kRead;
  if (why == SSL_ERROR_WANT_WRITE) return Needs::kWrite;
  if (why == SSL_ERROR_ZERO_RETURN) return absl::OutOfRangeError("the peer has ended");
  return absl::UnauthenticatedError(LastTlsError());
}

absl::StatusOr<HttpConnection::Needs> HttpConnection::Open() {
  if (tls_ == nullptr) return Needs::kNothing;
  if (session_ == nullptr) {
    session_ = SSL_new(tls_.get());
    if (session_ == nullptr || SSL_set_fd(session_, socket_.number()) != 1) {
      return absl::ResourceExhaustedError(LastTlsError());
    }
    LimitReads();
  }
  // SSL_get_error looks at this thread's queue of errors, which has to be empty before each
  // operation (SSL_get_error(3)); other connections use the thread, too.
  ERR_clear_error();
  const int result = SSL_accept(session_);
  if (result == 1) return Needs::kNothing;
  if (ERR_GET_REASON(ERR_peek_last_error()) == SSL_R_HTTP_REQUEST) {
    // The session has read the request already: what is left is to answer without TLS.
    SSL_free(std::exchange(session_, nullptr));
    ERR_clear_error();
    return absl::FailedPreconditionError("the peer speaks HTTP without TLS");
  }
  return NeedsOfTls(result);
}

absl::StatusOr<HttpConnection::Moved> HttpConnection::Read(char* buffer, size_t bytes) {
  if (session_ != nullptr) {
    ERR_clear_error();
    size_t read = 0;
    const int result = SSL_read_ex(session_, buffer, bytes, &read);
    if (result == 1) return Moved{.bytes = read};
    const absl::StatusOr<Needs> needs = NeedsOfTls(result);
    // By close_notify: as the end of a plain connection.
    if (absl::IsOutOfRange(needs.status())) return Moved{};
    if (!needs.ok()) return needs.status();
    return Moved{.needs = *needs};
  }
  while (true) {
    const ssize_t read = recv(socket_.number(), buffer, bytes, 0);
    if (read >= 0) return Moved{.bytes = static_cast<size_t>(read)};
    if (errno == EAGAIN) return Moved{.needs = Needs::kRead};
    if (errno != EINTR) return absl::UnavailableError(std::strerror(errno));
  }
}

absl::StatusOr<HttpConnection::Moved> HttpConnection::Write(absl::string_view text) {
  if (session_ != nullptr) {
    ERR_clear_error();
    size_t written = 0;
    const int result = SSL_write_ex(session_, text.data(), text.size(), &written);
    if (result == 1) return Moved{.bytes = written};
    BALLAST_ASSIGN_OR_RETURN(const Needs needs, NeedsOfTls(result));
    return Moved{.needs = needs};
  }
  while (true) {
    const ssize_t written = send(socket_.number(), text.data(), text.size(), MSG_NOSIGNAL);
    if (written >= 0) return Moved{.bytes = static_cast<size_t>(written)};
    if (errno == EAGAIN) return Moved{.needs = Needs::kWrite};
    if (errno != EINTR) return absl::UnavailableError(std::strerror(errno));
  }
}

void HttpConnection::End() {
  // After an end without it the peer could not know whether something is missing. It is one small
  // record: what does not fit into the socket now belongs to a peer that does not read.
  if (session_ != nullptr && SSL_is_init_finished(session_) == 1) SSL_shutdown(session_);
  ERR_clear_error();
  shutdown(socket_.number(), SHUT_WR);
}

HttpConnection::Needs HttpConnection::Discard() {
  // A socket that is closed before all has been read resets the connection, and the peer may lose
  // the answer (RFC 9112, 9.6). With TLS, too, nothing of it is looked at.
  std::array<char, 4096> rest;
  while (discarded_ < kMostDiscardedBytes) {
    const ssize_t read = recv(socket_.number(), rest.data(), rest.size(), 0);
    if (read < 0 && errno == EINTR) continue;
    if (read < 0 && errno == EAGAIN) return Needs::kRead;
    if (read <= 0) return Needs::kNothing;
    discarded_ += static_cast<size_t>(read);
  }
  return Needs::kNothing;
}

std::string HttpConnection::peer() const {
  sockaddr_storage name = {};
  socklen_t bytes = sizeof(name);
  if (getpeername(socket_.number(), reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return "";
  return PeerAt(name);
}

std::optional<std::string> HttpConnection::certificate_name() const {
  // The result is X509_V_OK also where no certificate was shown; that is asked below.
  if (session_ == nullptr || SSL_get_verify_result(session_) != X509_V_OK) return std::nullopt;
  const Certificate shown(SSL_get1_peer_certificate(session_), X509_free);
  if (shown == nullptr) return std::nullopt;
  std::string name = CommonName(shown.get());
  if (name.empty()) name = FirstOtherName(shown.get());
  // As of gRPC's connections: one that does not fit into a line is no name.
  return std::any_of(name.begin(), name.end(), absl::ascii_iscntrl) ? std::string() : name;
}

}  // namespace ballast::server
