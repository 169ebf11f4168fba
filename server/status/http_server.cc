#include "server/status/http_server.h"

#include <arpa/inet.h>
#include <httplib.h>
#include <netinet/in.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <deque>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "server/access/file_watch.h"
#include "server/listener.h"
#include "server/status/http_connection.h"

namespace ballast::server {
namespace {

// Each has one peer at a time.
constexpr size_t kThreads = 16;
// Peers that wait for a thread.
constexpr size_t kMostWaiting = 64;

// The page loads nothing from anywhere else, and no other page may show it or read it.
const httplib::Headers kHeaders = {
    {"Cache-Control", "no-store"},
    {"Content-Security-Policy",
     "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src "
     "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
    {"X-Content-Type-Options", "nosniff"},
    {"Referrer-Policy", "no-referrer"},
    {"Cross-Origin-Resource-Policy", "same-origin"}};

absl::Status CheckOpenness(const Address& address, const HttpOptions& options) {
  if (IsLocal(address)) return absl::OkStatus();
  const AccessOptions& access = options.access;
  const bool tls = !access.tls_certificate.empty();
  if (!tls && !access.tokens.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "refusing to listen on ", options.listen,
        ": others could read the tokens of --tokens-file on their way; give --tls-cert and "
        "--tls-key, or use a loopback address"));
  }
  const bool peers_are_known = !access.tokens.empty() || !access.tls_client_ca.empty();
  if (options.allow_remote || (tls && peers_are_known)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "refusing to listen on ", options.listen, ": other hosts could look at all jobs ",
      tls ? "without authentication; give --tls-client-ca or --tokens-file"
          : "without encryption; give --tls-cert, --tls-key and --tls-client-ca or --tokens-file",
      ", use a loopback address or --metrics-insecure"));
}

// Nothing is answered in parts. The library would look at a Range by std::regex, which takes a KB of
// the stack for each byte.
void HideRange(std::string& head) {
  for (size_t at = head.find('\n'); at != std::string::npos; at = head.find('\n', at + 1)) {
    if (absl::StartsWithIgnoreCase(absl::string_view(head).substr(at + 1), "range:")) {
      head[at + 1] = '-';
    }
  }
}

}  // namespace

// The library's own sockets are not used: those of the Listener are, which the holder keeps.
struct HttpServer::Impl : httplib::Server {
  Impl();
  ~Impl() override;

  void Take(FileDescriptor connection);
  // The one that has waited longest.
  void Serve();

  HttpAnswer Answer(const httplib::Request& request) const;
  // A browser sends the name that it was given. One that is neither this host's nor a number has
  // been made to lead here by another site's page. With TLS that page lacks a certificate for it.
  bool IsOwnName(const httplib::Request& request) const;
  absl::StatusOr<std::string> ReadTlsAgain();

  HttpOptions options;
  HttpServer::Handler handler;
  bool local = true;
  std::string address;
  Mutex mutex;
  HttpTls tls ABSL_GUARDED_BY(mutex);
  std::deque<FileDescriptor> waiting ABSL_GUARDED_BY(mutex);
  std::atomic<bool> is_hurried = false;  // Some wait.
  std::atomic<bool> ends = false;
  std::optional<FileWatch> files;
  httplib::ThreadPool threads{kThreads};  // A task for each that waits.
  std::optional<Listener> listener{std::in_place};
};

HttpServer::Impl::Impl() {
  set_default_headers(kHeaders);
  set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
    const HttpAnswer answer = Answer(request);
    response.status = answer.code;
    response.set_content(answer.body, answer.content_type);
    // 405 has to name what is allowed, and 401 how to say who asks (RFC 9110, 15.5).
    if (answer.code == 405) response.set_header("Allow", "GET, HEAD");
    if (answer.code == 401) response.set_header("WWW-Authenticate", "Bearer realm=\"ballast\"");
    return HandlerResponse::Handled;
  });
  set_exception_handler(
      [](const httplib::Request& request, httplib::Response& response, const std::exception_ptr&) {
        spdlog::warn("status page: {} could not be answered", request.path);
        response.status = 500;
        response.set_content("the answer could not be made\n", "text/plain");
      });
  // What the library refuses itself.
  set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (response.body.empty()) {
      response.set_content("the request is malformed, or too large\n", "text/plain");
    }
  });
}

HttpServer::Impl::~Impl() {
  listener.reset();
  files.reset();
  {
    MutexLock lock(mutex);
    waiting.clear();
  }
  ends = true;
  threads.shutdown();
}

void HttpServer::Impl::Take(FileDescriptor connection) {
  MutexLock lock(mutex);
  // Who has waited longest may have given up.
  const bool is_full = waiting.size() >= kMostWaiting;
  if (is_full) waiting.pop_front();
  waiting.push_back(std::move(connection));
  if (!is_full) threads.enqueue([this] { Serve(); });
  is_hurried = true;
}

void HttpServer::Impl::Serve() {
  FileDescriptor socket;
  HttpTls now;
  {
    MutexLock lock(mutex);
    if (waiting.empty()) return;  // It ends.
    socket = std::move(waiting.front());
    waiting.pop_front();
    is_hurried = !waiting.empty();
    now = tls;
  }
  HttpConnection peer(std::move(socket), now, [this] { return is_hurried || ends; });
  std::optional<std::string> head = peer.ReadHead();
  if (!head.has_value()) return;
  HideRange(*head);
  httplib::detail::BufferStream stream;
  stream.write(head->data(), head->size());
  bool closed = true;
  process_request(stream, /*close_connection=*/true, closed, [&](httplib::Request& request) {
    request.remote_addr = peer.peer();
    request.ssl = peer.session();
    request.headers.erase("Accept-Encoding");  // The training needs the processors.
  });
  if (peer.Write(absl::string_view(stream.get_buffer()).substr(head->size()))) peer.End();
}

HttpAnswer HttpServer::Impl::Answer(const httplib::Request& request) const {
  if (request.method != "GET" && request.method != "HEAD") {
    return {.code = 405, .body = "only GET and HEAD\n"};
  }
  // A proxy might go by the other one.
  if (request.get_header_value_count("Host") > 1 ||
      request.get_header_value_count("Authorization") > 1) {
    return {.code = 400, .body = "there are two hosts or two authorizations\n"};
  }
  if (!IsOwnName(request)) return {.code = 403, .body = "ask for localhost or an address\n"};
  return handler(request);
}

bool HttpServer::Impl::IsOwnName(const httplib::Request& request) const {
  // DNS rebinding. Only a browser can be misled so, and every browser sends a host.
  if (!local || !options.access.tls_certificate.empty() || !request.has_header("Host")) return true;
  const std::string host = request.get_header_value("Host");
  const std::string name = host.substr(0, host.find(':'));
  in_addr v4;
  return absl::EqualsIgnoreCase(name, "localhost") || inet_pton(AF_INET, name.c_str(), &v4) == 1 ||
         absl::StartsWith(host, "[");
}

absl::StatusOr<std::string> HttpServer::Impl::ReadTlsAgain() {
  BALLAST_ASSIGN_OR_RETURN(HttpTls read, ReadHttpTls(options.access));
  // Connections that there are go on with the one before, which they share.
  MutexLock lock(mutex);
  tls = std::move(read);
  return options.access.tls_certificate;
}

absl::StatusOr<Address> HttpServer::ParseListen(const HttpOptions& options) {
  const std::string& text = options.listen;
  const bool only_port = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  absl::StatusOr<Address> address = ParseAddress(only_port ? "127.0.0.1:" + text : text);
  if (!address.ok() || !address->unix_path.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on '", text,
                     "': expected PORT, or HOST:PORT, such as 127.0.0.1:7071 or [::1]:7071"));
  }
  BALLAST_RETURN_IF_ERROR(CheckOpenness(*address, options));
  return address;
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpOptions& options,
                                                              Handler handler,
                                                              NamedMemory* memory) {
  BALLAST_ASSIGN_OR_RETURN(const Address address, ParseListen(options));
  BALLAST_ASSIGN_OR_RETURN(HttpTls tls, ReadHttpTls(options.access));
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->handler = std::move(handler);
  impl->local = IsLocal(address);
  const auto warn = [](const std::string& line) { spdlog::warn("status page: {}", line); };
  ListeningSockets sockets;
  BALLAST_ASSIGN_OR_RETURN(impl->address, sockets.Add(address, memory, warn));
  if (tls != nullptr) {
    const AccessOptions& access = options.access;
    impl->files.emplace(
        std::vector<WatchedFiles>{{absl::StrCat("the certificate of ", impl->address),
                                   {access.tls_certificate, access.tls_key, access.tls_client_ca},
                                   [owner = impl.get()] { return owner->ReadTlsAgain(); }}});
    MutexLock lock(impl->mutex);
    impl->tls = std::move(tls);
  }
  BALLAST_RETURN_IF_ERROR(impl->listener->Start(
      std::move(sockets),
      [owner = impl.get()](int connection) { owner->Take(FileDescriptor(connection)); }, warn));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() = default;

const std::string& HttpServer::address() const { return impl_->address; }

}  // namespace ballast::server
