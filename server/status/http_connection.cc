#include "server/status/http_connection.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/sslerr.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "server/address.h"

namespace ballast::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr size_t kMostHeadBytes = 16384;
constexpr char kEndOfHead[] = "\r\n\r\n";
constexpr size_t kEndBytes = 4;

// For the handshake and a whole request, for taking a whole answer, and for the peer's end.
constexpr seconds kToAsk(2);
constexpr seconds kToTake(20);
constexpr seconds kToEnd(1);
// Instead, where others wait.
constexpr milliseconds kHurried(500);
// How often it is looked whether they do.
constexpr milliseconds kLookEvery(50);

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

// Asks for a certificate; without SSL_VERIFY_FAIL_IF_NO_PEER_CERT there need be none.
bool TrustClientsOf(SSL_CTX* tls, const std::string& authorities) {
  SSL_CTX_set_verify(tls, SSL_VERIFY_PEER, nullptr);
  // The client is sent these names, and chooses its certificate by them.
  SSL_CTX_set_client_CA_list(tls, SSL_load_client_CA_file(authorities.c_str()));
  // An authority that another has signed is enough, as for gRPC's connections.
  X509_STORE_set_flags(SSL_CTX_get_cert_store(tls), X509_V_FLAG_PARTIAL_CHAIN);
  return SSL_CTX_load_verify_locations(tls, authorities.c_str(), nullptr) == 1;
}

absl::Status CannotUse(const std::string& file) {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  return absl::InvalidArgumentError(
      absl::StrCat(file, " cannot be used: ", reason == nullptr ? "it is wrong" : reason));
}

}  // namespace

absl::StatusOr<HttpTls> ReadHttpTls(const AccessOptions& options) {
  if (options.tls_certificate.empty()) return nullptr;
  // It says what is wrong with the files.
  BALLAST_RETURN_IF_ERROR(ReadKeyPair(options.tls_certificate, options.tls_key).status());
  HttpTls tls(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  SSL_CTX_set_min_proto_version(tls.get(), TLS1_2_VERSION);
  // Each connection has one request, and what a session had been shown may have been revoked.
  SSL_CTX_set_session_cache_mode(tls.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(tls.get(), 0);
  SSL_CTX_set_options(tls.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  // A peer may send any number of records that are no data. After each the time is looked at.
  SSL_CTX_clear_mode(tls.get(), SSL_MODE_AUTO_RETRY);
  ERR_clear_error();
  if (SSL_CTX_use_certificate_chain_file(tls.get(), options.tls_certificate.c_str()) != 1 ||
      SSL_CTX_use_PrivateKey_file(tls.get(), options.tls_key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return CannotUse(options.tls_certificate);
  }
  if (options.tls_client_ca.empty()) return tls;
  BALLAST_RETURN_IF_ERROR(ReadCertificateAuthority(options.tls_client_ca).status());
  return TrustClientsOf(tls.get(), options.tls_client_ca) ? absl::StatusOr<HttpTls>(std::move(tls))
                                                          : CannotUse(options.tls_client_ca);
}

std::optional<std::string> CertificateName(const SSL* session) {
  // The result is X509_V_OK also where no certificate was shown; that is asked below.
  if (session == nullptr || SSL_get_verify_result(session) != X509_V_OK) return std::nullopt;
  const std::unique_ptr<X509, decltype(&X509_free)> shown(SSL_get1_peer_certificate(session),
                                                          X509_free);
  if (shown == nullptr) return std::nullopt;
  std::string name = CommonName(shown.get());
  if (name.empty()) name = FirstOtherName(shown.get());
  // As of gRPC's connections: one that does not fit into a line is no name.
  return std::any_of(name.begin(), name.end(), absl::ascii_iscntrl) ? std::string() : name;
}

HttpConnection::HttpConnection(FileDescriptor socket, const HttpTls& tls, IsHurried is_hurried)
    : socket_(std::move(socket)),
      session_(tls == nullptr ? nullptr : SSL_new(tls.get()), SSL_free),
      is_hurried_(std::move(is_hurried)) {
  if (session_ != nullptr) SSL_set_fd(session_.get(), socket_.number());
}

bool HttpConnection::Await(short events) const {  // NOLINT
  while (true) {
    const auto passed = steady_clock::now() - begun_;
    if (passed >= patience_ || (passed >= kHurried && is_hurried_())) return false;
    pollfd socket = {.fd = socket_.number(), .events = events, .revents = 0};
    const int ready = poll(&socket, 1, static_cast<int>(kLookEvery.count()));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

bool HttpConnection::Try(short events, absl::FunctionRef<int()> operation) {  // NOLINT
  while (true) {
    // Other connections use this thread's queue of errors, too (SSL_get_error(3)).
    ERR_clear_error();
    const int result = operation();
    if (result > 0) return true;
    if (session_ != nullptr) {
      const int why = SSL_get_error(session_.get(), result);
      if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) return false;
      events = why == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT;
    } else if (result == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    }
    if (!Await(events)) return false;
  }
}

bool HttpConnection::Handshake() {
  if (Try(POLLIN, [this] { return SSL_accept(session_.get()); })) return true;
  if (ERR_GET_REASON(ERR_peek_last_error()) == SSL_R_HTTP_REQUEST) {
    session_.reset();
    Write(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
        "this port speaks TLS: ask for https://\n");
  }
  End();  // It may read an alert.
  return false;
}

std::optional<std::string> HttpConnection::ReadHead() {
  begun_ = steady_clock::now();
  patience_ = kToAsk;
  if (session_ != nullptr && !Handshake()) return std::nullopt;
  std::string head;
  std::array<char, 4096> part;
  while (head.size() < kMostHeadBytes) {
    size_t bytes = 0;
    const bool read = Try(POLLIN, [&] {
      if (session_ != nullptr) {
        return SSL_read_ex(session_.get(), part.data(), part.size(), &bytes);
      }
      const ssize_t result = recv(socket_.number(), part.data(), part.size(), 0);
      bytes = static_cast<size_t>(std::max<ssize_t>(result, 0));
      return static_cast<int>(result);
    });
    if (!read) return std::nullopt;
    const size_t before = std::max(head.size(), kEndBytes) - kEndBytes;
    head.append(part.data(), bytes);
    const size_t end = head.find(kEndOfHead, before);
    // What the peer sends after it is left.
    if (end != std::string::npos) return head.substr(0, end + kEndBytes);
  }
  return head;
}

bool HttpConnection::Write(absl::string_view text) {
  begun_ = steady_clock::now();
  patience_ = kToTake;
  while (!text.empty()) {
    size_t bytes = 0;
    const bool written = Try(POLLOUT, [&] {
      if (session_ != nullptr) {
        return SSL_write_ex(session_.get(), text.data(), text.size(), &bytes);
      }
      const ssize_t result = send(socket_.number(), text.data(), text.size(), MSG_NOSIGNAL);
      bytes = static_cast<size_t>(std::max<ssize_t>(result, 0));
      return result > 0 ? 1 : static_cast<int>(result);
    });
    if (!written) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

void HttpConnection::End() {
  begun_ = steady_clock::now();
  patience_ = kToEnd;
  // After an end without it the peer could not know whether something is missing.
  if (session_ != nullptr) SSL_shutdown(session_.get());
  shutdown(socket_.number(), SHUT_WR);
  // A socket that is closed before all has been read resets the connection, and the peer may lose
  // the answer (RFC 9112, 9.6). With TLS, too, nothing of it is looked at.
  std::array<char, 4096> rest;
  while (!is_hurried_() && Await(POLLIN) &&
         recv(socket_.number(), rest.data(), rest.size(), 0) > 0) {
  }
}

std::string HttpConnection::peer() const {
  sockaddr_storage name = {};
  socklen_t bytes = sizeof(name);
  if (getpeername(socket_.number(), reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return "";
  return PeerAt(name);
}

}  // namespace ballast::server
