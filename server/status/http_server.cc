#include "server/status/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "server/access/file_watch.h"
#include "server/address.h"
#include "server/status/http_connection.h"

namespace ballast::server {
namespace {

using std::chrono::steady_clock;

constexpr int kThreads = 24;
constexpr int kWaiting = 64;  // Connections that no thread has yet; further ones are tried again.
constexpr std::chrono::milliseconds kHandshake(2000);
constexpr std::chrono::milliseconds kRequest(2000);  // For a whole request to come.
// For each of the two while most threads are taken, so that a burst of silent peers is soon over.
constexpr std::chrono::milliseconds kWhileBusy(300);
constexpr int kBusyThreads = kThreads * 3 / 4;
constexpr std::chrono::seconds kAnswer(20);  // For a whole answer to go.
constexpr std::chrono::seconds kEnd(1);      // For the peer to end after it.
constexpr std::chrono::milliseconds kPause(10);

// The page loads nothing from anywhere else, and no other page may show it or read it.
constexpr char kHeaders[] =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n";

absl::Status CheckOpenness(const Address& address, const HttpOptions& options) {
  if (IsLocal(address)) return absl::OkStatus();
  const AccessOptions& access = options.access;
  const bool tls = !access.tls_certificate.empty();
  if (!tls && !access.tokens.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "refusing to listen on ", options.listen,
        ": who sees the network could read the tokens of --tokens-file; give --tls-cert and "
        "--tls-key, or use a loopback address"));
  }
  const bool everybody_is_known = !access.tokens.empty() || !access.tls_client_ca.empty();
  if (options.allow_remote || (tls && everybody_is_known)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "refusing to listen on ", options.listen, ": other hosts could look at all jobs ",
      tls ? "without saying who they are; give --tls-client-ca or --tokens-file"
          : "without encryption; give --tls-cert, --tls-key and --tls-client-ca or --tokens-file",
      ", use a loopback address or --metrics-insecure"));
}

absl::StatusOr<Address> ParseListenAddress(const HttpOptions& options) {
  const std::string& text = options.listen;
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
  BALLAST_RETURN_IF_ERROR(CheckOpenness(*address, options));
  return address;
}

// Sets the address's port to the one that is listened on.
absl::StatusOr<FileDescriptor> Listen(Address& address) {
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(address.port));
  inet_pton(AF_INET, address.host.c_str(), &name.sin_addr);
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  // A port whose last connections are being forgotten is free; one that is listened on is not.
  if (socket) setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  socklen_t bytes = sizeof(name);
  auto* const generic = reinterpret_cast<sockaddr*>(&name);
  if (!socket || bind(socket.number(), generic, bytes) != 0 ||
      listen(socket.number(), kWaiting) != 0 ||
      getsockname(socket.number(), generic, &bytes) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address.host, ":", address.port, ": ",
                     errno == EADDRINUSE ? "another process does; stop it or choose another port"
                                         : std::strerror(errno)));
  }
  address.port = ntohs(name.sin_port);
  return socket;
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
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
    default:
      return "Internal Server Error";
  }
}

std::string ToText(const HttpAnswer& answer, bool with_body) {
  return absl::StrCat("HTTP/1.1 ", answer.code, " ", TextOf(answer.code), "\r\n",
                      "Content-Type: ", answer.content_type,
                      "\r\nContent-Length: ", answer.body.size(), "\r\nConnection: close\r\n",
                      answer.code == 405 ? "Allow: GET, HEAD\r\n" : "",
                      answer.code == 401 ? "WWW-Authenticate: Bearer realm=\"ballast\"\r\n" : "",
                      kHeaders, "\r\n", with_body ? answer.body : "");
}

// The head of a request; what the peer sends after it is left.
absl::StatusOr<std::string> ReadHead(HttpConnection& connection,
                                     HttpConnection::Deadline deadline) {
  std::string text;
  std::array<char, 4096> buffer;
  while (true) {
    BALLAST_ASSIGN_OR_RETURN(const size_t bytes,
                             connection.Read(buffer.data(), buffer.size(), deadline));
    if (bytes == 0) return absl::UnavailableError("the peer has ended");
    text.append(buffer.data(), bytes);
    if (const size_t head = HeadBytes(text); head > 0) return text.substr(0, head);
    if (text.size() > kMostHeadBytes) return absl::OutOfRangeError("too large");
  }
}

}  // namespace

struct HttpServer::Impl {
  ~Impl();

  absl::Status StartThreads();
  // A thread's whole life. One waits for a connection, the others answer or wait for their turn.
  void Run();
  // Without a connection: the server ends.
  FileDescriptor Accept();
  void Serve(FileDescriptor socket);
  HttpAnswer Answer(const absl::StatusOr<std::string>& head, HttpConnection& connection,
                    bool& with_body) const;
  HttpAnswer AnswerRequest(const HttpRequest& request) const;
  // A browser sends the name that it was given. One that is neither this host's nor a number has
  // been made to lead here by somebody else's page. With TLS that page lacks a certificate for it.
  bool IsOwnName(const std::optional<std::string>& host) const;
  absl::StatusOr<std::string> ReadTlsAgain();

  HttpOptions options;
  Handler handler;
  bool local = true;
  std::string address;
  FileDescriptor socket;
  FileDescriptor stop;
  Mutex accepting;  // Held by the thread that waits for a connection.
  Mutex mutex;
  HttpTls tls ABSL_GUARDED_BY(mutex);
  std::optional<FileWatch> files;
  std::atomic<int> serving = 0;  // Threads that have a connection.
  std::vector<std::thread> threads;
};

HttpServer::Impl::~Impl() {
  files.reset();
  const uint64_t one = 1;
  if (stop) static_cast<void>(!write(stop.number(), &one, sizeof(one)));
  for (std::thread& thread : threads) thread.join();
}

absl::Status HttpServer::Impl::StartThreads() {
  stop = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop) return absl::UnavailableError("no file descriptors are left; see to ulimit -n");
  threads.reserve(kThreads);
  try {
    for (int i = 0; i < kThreads; ++i) threads.emplace_back([this] { Run(); });
  } catch (const std::system_error& error) {  // A limit; some are enough.
    if (threads.empty()) {
      return absl::UnavailableError(absl::StrCat("no thread can be started: ", error.what()));
    }
  }
  return absl::OkStatus();
}

FileDescriptor HttpServer::Impl::Accept() {
  MutexLock lock(accepting);
  while (true) {
    std::array<pollfd, 2> polled = {{{.fd = stop.number(), .events = POLLIN, .revents = 0},
                                     {.fd = socket.number(), .events = POLLIN, .revents = 0}}};
    const bool ready = poll(polled.data(), polled.size(), -1) > 0;
    if (ready && polled[0].revents != 0) return FileDescriptor();
    FileDescriptor taken(accept4(socket.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (taken) return taken;
    // No descriptor or no memory is left, now.
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
      std::this_thread::sleep_for(kPause);
    }
  }
}

void HttpServer::Impl::Run() {
  while (FileDescriptor taken = Accept()) {
    ++serving;
    (void)RunsInMemory([&] { Serve(std::move(taken)); });  // Without it the peer gets no answer.
    --serving;
  }
}

void HttpServer::Impl::Serve(FileDescriptor taken) {
  HttpTls now;
  {
    MutexLock lock(mutex);
    now = tls;
  }
  HttpConnection connection(std::move(taken), std::move(now));
  HttpAnswer answer;
  bool with_body = true;
  const auto patience = [this](std::chrono::milliseconds usual) {
    return steady_clock::now() + (serving > kBusyThreads ? kWhileBusy : usual);
  };
  if (const absl::Status open = connection.Open(patience(kHandshake)); open.ok()) {
    const absl::StatusOr<std::string> head = ReadHead(connection, patience(kRequest));
    if (!head.ok() && !absl::IsOutOfRange(head.status())) return;
    answer = Answer(head, connection, with_body);
  } else {
    spdlog::debug("status page: {}: {}", connection.peer(), std::string(open.message()));
    if (!absl::IsFailedPrecondition(open)) return connection.Close(steady_clock::now() + kEnd);
    answer = {.code = 400, .body = "this port speaks TLS: ask for https://\n"};
  }
  if (connection.Write(ToText(answer, with_body), steady_clock::now() + kAnswer).ok()) {
    connection.Close(steady_clock::now() + kEnd);
  }
}

HttpAnswer HttpServer::Impl::Answer(const absl::StatusOr<std::string>& head,
                                    HttpConnection& connection, bool& with_body) const {
  if (!head.ok()) return {.code = 431, .body = "the request is too large\n"};
  absl::StatusOr<HttpRequest> request = ParseHead(*head);
  if (!request.ok()) {
    return {.code = 400, .body = absl::StrCat("no request: ", request.status().message(), "\n")};
  }
  with_body = request->method != "HEAD";
  request->peer = connection.peer();
  request->certificate_name = connection.certificate_name();
  return AnswerRequest(*request);
}

HttpAnswer HttpServer::Impl::AnswerRequest(const HttpRequest& request) const {
  if (request.method != "GET" && request.method != "HEAD") {
    return {.code = 405, .body = "only GET and HEAD\n"};
  }
  if (!IsOwnName(request.host)) return {.code = 403, .body = "ask for localhost or an address\n"};
  try {
    return handler(request);
  } catch (const std::exception& error) {
    spdlog::warn("status page: {}: {}", request.path, error.what());
    return {.code = 500, .body = "the answer could not be made\n"};
  }
}

bool HttpServer::Impl::IsOwnName(const std::optional<std::string>& host) const {
  if (!local || !options.access.tls_certificate.empty() || !host.has_value()) return true;
  const std::string name = host->substr(0, host->find(':'));
  in_addr v4;
  return name == "localhost" || inet_pton(AF_INET, name.c_str(), &v4) == 1 ||
         absl::StartsWith(*host, "[");
}

absl::StatusOr<std::string> HttpServer::Impl::ReadTlsAgain() {
  BALLAST_ASSIGN_OR_RETURN(HttpTls read, ReadHttpTls(options.access));
  MutexLock lock(mutex);
  tls = std::move(read);
  return options.access.tls_certificate;
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpOptions& options,
                                                              Handler handler) {
  BALLAST_ASSIGN_OR_RETURN(Address address, ParseListenAddress(options));
  BALLAST_ASSIGN_OR_RETURN(HttpTls tls, ReadHttpTls(options.access));
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->handler = std::move(handler);
  impl->local = IsLocal(address);
  BALLAST_ASSIGN_OR_RETURN(impl->socket, Listen(address));
  impl->address = absl::StrCat(address.host, ":", address.port);
  if (tls != nullptr) {
    const AccessOptions& access = options.access;
    impl->files.emplace(
        std::vector<WatchedFiles>{{absl::StrCat("the certificate of ", impl->address),
                                   {access.tls_certificate, access.tls_key, access.tls_client_ca},
                                   [owner = impl.get()] { return owner->ReadTlsAgain(); }}});
    MutexLock lock(impl->mutex);
    impl->tls = std::move(tls);
  }
  BALLAST_RETURN_IF_ERROR(impl->StartThreads());
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() = default;

const std::string& HttpServer::address() const { return impl_->address; }

}  // namespace ballast::server
