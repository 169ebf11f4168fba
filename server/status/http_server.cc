#include "server/status/http_server.h"

#include <arpa/inet.h>
#include <civetweb.h>
#include <spdlog/spdlog.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/status.h"
#include "server/address.h"

namespace ballast::server {
namespace {

constexpr char kThreads[] = "24";
constexpr char kTimeoutMilliseconds[] = "2000";  // For a request to come, and for a part to go.
constexpr size_t kMostQueryBytes = 8192;

// The page loads nothing from anywhere else, and no other page may show it or read it.
constexpr char kHeaders[] =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n";

absl::StatusOr<Address> ParseListenAddress(const std::string& text, bool allow_remote) {
  const bool only_port = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  auto address = ParseAddress(only_port ? absl::StrCat("127.0.0.1:", text) : text);
  in_addr v4;
  if (address.ok() && address->host == "localhost") address->host = "127.0.0.1";
  if (!address.ok() || inet_pton(AF_INET, address->host.c_str(), &v4) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on '", text,
                     "': expected PORT, or HOST:PORT with localhost or an IPv4 address, such as "
                     "127.0.0.1:7071"));
  }
  if (!allow_remote && !IsLocal(*address)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "refusing to listen on ", text,
        ": other hosts could look at all jobs; use a loopback address or --metrics-insecure"));
  }
  return address;
}

std::string Decode(absl::string_view text) {
  std::vector<char> buffer(text.size() + 1);
  const int size = mg_url_decode(text.data(), static_cast<int>(text.size()), buffer.data(),
                                 static_cast<int>(buffer.size()), /*is_form_url_encoded=*/1);
  return size < 0 ? std::string() : std::string(buffer.data(), size);
}

HttpRequest ToRequest(const mg_request_info& info, const char* authorization) {
  HttpRequest request;
  request.authorization = authorization == nullptr ? "" : authorization;
  request.peer = info.remote_addr;
  request.path = info.local_uri == nullptr ? "" : info.local_uri;
  const absl::string_view query = info.query_string == nullptr ? "" : info.query_string;
  if (query.size() > kMostQueryBytes) return request;
  for (const absl::string_view part : absl::StrSplit(query, '&', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    request.query.emplace(Decode(pair.first), Decode(pair.second));
  }
  return request;
}

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
    case 503:
      return "Service Unavailable";
    default:
      return "Internal Server Error";
  }
}

void Send(mg_connection* connection, const HttpAnswer& answer, bool with_body) {
  const std::string head = absl::StrCat(
      "HTTP/1.1 ", answer.code, " ", TextOf(answer.code), "\r\n",
      "Content-Type: ", answer.content_type, "\r\nContent-Length: ", answer.body.size(),
      "\r\nConnection: close\r\n", answer.code == 405 ? "Allow: GET, HEAD\r\n" : "",
      answer.code == 401 ? "WWW-Authenticate: Bearer realm=\"ballast\"\r\n" : "", kHeaders, "\r\n");
  mg_write(connection, head.data(), head.size());
  if (with_body) mg_write(connection, answer.body.data(), answer.body.size());
}

}  // namespace

std::string HttpRequest::Get(const std::string& name) const {
  const auto found = query.find(name);
  return found == query.end() ? std::string() : found->second;
}

struct HttpServer::Impl {
  static int OnRequest(mg_connection* connection);
  static int OnLog(const mg_connection* connection, const char* message);
  // A browser sends the name that it was given. One that is neither this host's nor a number has
  // been made to lead here by somebody else's page.
  bool IsOwnName(const char* host) const;
  HttpAnswer Answer(const mg_request_info& info, const char* host, const char* authorization) const;

  Handler handler;
  bool local = true;
  std::string address;
  std::mutex log_mutex;
  std::string log;  // While starting.
  mg_context* context = nullptr;
};

int HttpServer::Impl::OnLog(const mg_connection* connection, const char* message) {
  auto* const impl = static_cast<Impl*>(mg_get_user_data(mg_get_context(connection)));
  if (impl != nullptr) {
    const std::lock_guard lock(impl->log_mutex);
    if (impl->log.size() < 1024) absl::StrAppend(&impl->log, message, "; ");
  }
  spdlog::debug("status page: {}", message);
  return 1;
}

bool HttpServer::Impl::IsOwnName(const char* host) const {
  if (!local) return true;
  if (host == nullptr) return true;
  const std::string name =
      std::string(absl::string_view(host).substr(0, std::string(host).find(':')));
  in_addr v4;
  return name == "localhost" || inet_pton(AF_INET, name.c_str(), &v4) == 1 ||
         absl::StartsWith(host, "[");
}

HttpAnswer HttpServer::Impl::Answer(const mg_request_info& info, const char* host,
                                    const char* authorization) const {
  const absl::string_view method = info.request_method == nullptr ? "" : info.request_method;
  if (method != "GET" && method != "HEAD") return {.code = 405, .body = "only GET and HEAD\n"};
  if (!IsOwnName(host)) return {.code = 403, .body = "ask for localhost or an address\n"};
  try {
    return handler(ToRequest(info, authorization));
  } catch (const std::exception& error) {
    spdlog::warn("status page: {}: {}", info.local_uri, error.what());
    return {.code = 500, .body = "the answer could not be made\n"};
  }
}

int HttpServer::Impl::OnRequest(mg_connection* connection) {
  const mg_request_info& info = *mg_get_request_info(connection);
  const auto& impl = *static_cast<const Impl*>(info.user_data);
  const HttpAnswer answer = impl.Answer(info, mg_get_header(connection, "Host"),
                                        mg_get_header(connection, "Authorization"));
  Send(connection, answer, absl::string_view(info.request_method) != "HEAD");
  return answer.code;
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& text,
                                                              bool allow_remote, Handler handler) {
  BALLAST_ASSIGN_OR_RETURN(const Address address, ParseListenAddress(text, allow_remote));
  auto impl = std::make_unique<Impl>();
  impl->handler = std::move(handler);
  impl->local = IsLocal(address);
  const std::string listen = absl::StrCat(address.host, ":", address.port);
  const std::array<const char*, 15> options = {"listening_ports",
                                               listen.c_str(),
                                               "num_threads",
                                               kThreads,
                                               "request_timeout_ms",
                                               kTimeoutMilliseconds,
                                               "enable_keep_alive",
                                               "no",
                                               "enable_directory_listing",
                                               "no",
                                               "linger_timeout_ms",
                                               "1000",
                                               nullptr,
                                               nullptr,
                                               nullptr};
  mg_callbacks callbacks = {};
  callbacks.begin_request = Impl::OnRequest;
  callbacks.log_message = Impl::OnLog;
  static std::once_flag once;
  std::call_once(once, [] { mg_init_library(MG_FEATURES_DEFAULT); });
  impl->context = mg_start(&callbacks, impl.get(), const_cast<const char**>(options.data()));
  if (impl->context == nullptr) {
    const bool taken = absl::StrContains(impl->log, std::strerror(EADDRINUSE));
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", listen, ": ",
                     taken ? "another process does; stop it or choose another port" : impl->log));
  }
  mg_server_port port = {};
  mg_get_server_ports(impl->context, 1, &port);
  impl->address = absl::StrCat(address.host, ":", port.port);
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() { mg_stop(impl_->context); }

const std::string& HttpServer::address() const { return impl_->address; }

}  // namespace ballast::server
