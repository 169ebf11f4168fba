#include "server/status/http_exchange.h"

#include <spdlog/spdlog.h>

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast::server {
namespace {

using std::chrono::seconds;

// For a handshake, a whole request, a whole answer, and for the peer to end after it.
// In the order of HttpExchange::Part.
constexpr std::array<seconds, 4> kPatience = {seconds(2), seconds(2), seconds(20), seconds(1)};

// The page loads nothing from anywhere else, and no other page may show it or read it.
constexpr char kHeaders[] =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n";

const char* TextOf(int code) {
  switch (code) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
    default:
      return "Internal Server Error";
  }
}

std::string ToText(const HttpAnswer& answer, bool with_body) {
  // 405 has to name what is allowed, and 401 how to say who asks (RFC 9110, 15.5).
  return absl::StrCat("HTTP/1.1 ", answer.code, " ", TextOf(answer.code), "\r\n",
                      "Content-Type: ", answer.content_type,
                      "\r\nContent-Length: ", answer.body.size(), "\r\nConnection: close\r\n",
                      answer.code == 405 ? "Allow: GET, HEAD\r\n" : "",
                      answer.code == 401 ? "WWW-Authenticate: Bearer realm=\"ballast\"\r\n" : "",
                      kHeaders, "\r\n", with_body ? answer.body : "");
}

}  // namespace

HttpExchange::HttpExchange(FileDescriptor socket, HttpTls tls)
    : connection_(std::move(socket), std::move(tls)) {
  Begin(Part::kOpening);
}

void HttpExchange::Begin(Part part) {
  part_ = part;
  deadline_ = Clock::now() + kPatience[static_cast<size_t>(part)];
  // The peer sees the end now. The connection stays until the peer has ended, too (Discard).
  if (part == Part::kEnding) connection_.End();
}

void HttpExchange::BeginAnswer(const HttpAnswer& answer, bool with_body) {
  // HEAD gets the head of GET, with the length of the body that does not come (RFC 9110, 9.3.2).
  text_ = ToText(answer, with_body);
  Begin(Part::kAnswering);
}

HttpConnection::Needs HttpExchange::Proceed(const Answerer& answer) {
  while (true) {
    const Part part = part_;
    Needs needs = Needs::kNothing;
    switch (part) {
      case Part::kOpening:
        needs = Open();
        break;
      case Part::kAsking:
        needs = Ask(answer);
        break;
      case Part::kAnswering:
        needs = Answer();
        break;
      case Part::kEnding:
        needs = connection_.Discard();
        break;
    }
    // A part that needs nothing, and has begun no other one, has ended the exchange.
    if (needs != Needs::kNothing || part_ == part) return needs;
  }
}

HttpConnection::Needs HttpExchange::Open() {
  const absl::StatusOr<Needs> needs = connection_.Open();
  if (!needs.ok()) {
    spdlog::debug("status page: {}: {}", peer(), std::string(needs.status().message()));
    if (absl::IsFailedPrecondition(needs.status())) {
      BeginAnswer({.code = 400, .body = "this port speaks TLS: ask for https://\n"});
    } else {
      Begin(Part::kEnding);  // It may read an alert.
    }
    return Needs::kNothing;
  }
  if (*needs == Needs::kNothing) Begin(Part::kAsking);
  return *needs;
}

HttpConnection::Needs HttpExchange::Ask(const Answerer& answer) {
  // It reads until nothing is left: epoll does not tell of bytes that OpenSSL has read already.
  std::array<char, 4096> buffer;
  while (true) {
    const absl::StatusOr<HttpConnection::Moved> read =
        connection_.Read(buffer.data(), buffer.size());
    if (!read.ok()) return Needs::kNothing;
    if (read->needs != Needs::kNothing) return read->needs;
    if (read->bytes == 0) return Needs::kNothing;
    head_.append(buffer.data(), read->bytes);
    const size_t head = HeadBytes(head_);
    if (head == 0 && head_.size() > kMostHeadBytes) {
      BeginAnswer({.code = 431, .body = "the request is too large\n"});
      return Needs::kNothing;
    }
    if (head == 0) continue;
    head_.resize(head);  // What the peer sends after it is left.
    absl::StatusOr<HttpRequest> request = ParseHead(head_);
    if (!request.ok()) {
      BeginAnswer(
          {.code = 400, .body = absl::StrCat("no request: ", request.status().message(), "\n")});
      return Needs::kNothing;
    }
    request->peer = peer();
    request->certificate_name = connection_.certificate_name();
    // It may take seconds, without any lock; the deadline for sending it begins afterwards.
    BeginAnswer(answer(*request), request->method != "HEAD");
    return Needs::kNothing;
  }
}

HttpConnection::Needs HttpExchange::Answer() {
  while (written_ < text_.size()) {
    const absl::StatusOr<HttpConnection::Moved> written =
        connection_.Write(absl::string_view(text_).substr(written_));
    if (!written.ok()) return Needs::kNothing;
    if (written->needs != Needs::kNothing) return written->needs;
    written_ += written->bytes;
  }
  text_.clear();
  Begin(Part::kEnding);
  return Needs::kNothing;
}

}  // namespace ballast::server
