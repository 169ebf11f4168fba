#include "server/status/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <exception>
#include <map>
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
#include "server/listener.h"
#include "server/status/http_connection.h"

namespace ballast::server {
namespace {

using Clock = HttpExchange::Clock;
using Needs = HttpConnection::Needs;

// They work: an answer may read a large parameter. None waits for a peer.
constexpr int kThreads = 8;
// Peers that have begun to speak, each of which may have an answer in memory.
constexpr size_t kMostExchanges = 64;
// And those that have not.
constexpr size_t kMostNewcomers = 1024;
// How often exchanges are looked at that may be over.
constexpr std::chrono::milliseconds kLookEvery(100);
constexpr uint64_t kStop = 0;  // No exchange has this number.

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
      tls ? "without saying who they are; give --tls-client-ca or --tokens-file"
          : "without encryption; give --tls-cert, --tls-key and --tls-client-ca or --tokens-file",
      ", use a loopback address or --metrics-insecure"));
}

uint32_t EventsFor(Needs needs) {
  // EPOLLONESHOT: until Await is called again no other thread gets an event of this exchange.
  return (needs == Needs::kWrite ? EPOLLOUT : EPOLLIN) | EPOLLONESHOT;
}

}  // namespace

struct HttpServer::Impl {
  ~Impl();

  absl::Status StartThreads();
  // A thread's whole life.
  void Run();
  // A connection whose client has begun to speak.
  void Take(FileDescriptor connection);
  // One that can go on, or is over.
  void GoOn(uint64_t number);
  // Gives up those whose time is over.
  void DropLate(Clock::time_point now);

  HttpAnswer Answer(const HttpRequest& request) const;
  // A browser sends the name that it was given. One that is neither this host's nor a number has
  // been made to lead here by another site's page. With TLS that page lacks a certificate for it.
  bool IsOwnName(const std::optional<std::string>& host) const;
  absl::StatusOr<std::string> ReadTlsAgain();

  // An exchange is a thread's while it goes on.
  struct Visit {
    std::unique_ptr<HttpExchange> exchange;  // Null: a thread has it.
    std::string source;
  };
  using Visits = std::map<uint64_t, Visit>;  // From the oldest on.
  // The oldest exchange, of those that no thread has, of the source that has most; the end: none.
  Visits::iterator ChooseToDrop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Until it needs no more. False: the system has no memory for that.
  bool Await(uint64_t number, int socket, Needs needs, int operation) const;

  HttpOptions options;
  Handler handler;
  bool local = true;
  std::string address;
  FileDescriptor events;
  FileDescriptor stop;
  Mutex mutex;
  HttpTls tls ABSL_GUARDED_BY(mutex);
  Visits visits ABSL_GUARDED_BY(mutex);
  uint64_t last_number ABSL_GUARDED_BY(mutex) = kStop;
  Clock::time_point next_look ABSL_GUARDED_BY(mutex);
  std::optional<FileWatch> files;
  std::vector<std::thread> threads;
  Listener listener;  // Ends first.
};

HttpServer::Impl::~Impl() {
  files.reset();
  const uint64_t one = 1;
  if (stop) static_cast<void>(!write(stop.number(), &one, sizeof(one)));
  for (std::thread& thread : threads) thread.join();
}

absl::Status HttpServer::Impl::StartThreads() {
  events = FileDescriptor(epoll_create1(EPOLL_CLOEXEC));
  stop = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  // It is never read, and not EPOLLONESHOT: once written to, it wakes every thread.
  epoll_event event = {.events = EPOLLIN, .data = {.u64 = kStop}};
  if (!events || !stop || epoll_ctl(events.number(), EPOLL_CTL_ADD, stop.number(), &event) != 0) {
    return absl::UnavailableError("no file descriptors are left; see to ulimit -n");
  }
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

void HttpServer::Impl::Run() {
  while (true) {
    bool waits_for_peers = false;
    {
      MutexLock lock(mutex);
      waits_for_peers = !visits.empty();
    }
    epoll_event event = {};
    // Without exchanges nothing can be late. A new one is of a peer that has spoken, so it wakes a
    // thread, which looks from then on.
    const int wait = waits_for_peers ? static_cast<int>(kLookEvery.count()) : -1;
    const int count = epoll_wait(events.number(), &event, 1, wait);
    if (count > 0 && event.data.u64 == kStop) return;
    if (count > 0) GoOn(event.data.u64);
    DropLate(Clock::now());
  }
}

HttpServer::Impl::Visits::iterator HttpServer::Impl::ChooseToDrop() {
  std::map<std::string, size_t> counts;
  for (const auto& [number, visit] : visits) ++counts[visit.source];
  auto chosen = visits.end();
  for (auto visit = visits.begin(); visit != visits.end(); ++visit) {
    if (visit->second.exchange == nullptr) continue;
    if (chosen == visits.end() || counts[visit->second.source] > counts[chosen->second.source]) {
      chosen = visit;
    }
  }
  return chosen;
}

bool HttpServer::Impl::Await(uint64_t number, int socket, Needs needs, int operation) const {
  epoll_event event = {.events = EventsFor(needs), .data = {.u64 = number}};
  return epoll_ctl(events.number(), operation, socket, &event) == 0;
}

void HttpServer::Impl::Take(FileDescriptor connection) {
  std::unique_ptr<HttpExchange> dropped;  // Destroyed without the lock.
  MutexLock lock(mutex);
  auto exchange = std::make_unique<HttpExchange>(std::move(connection), tls);
  if (visits.size() >= kMostExchanges) {
    const auto chosen = ChooseToDrop();
    // Threads have them all; there are fewer threads, so this does not happen.
    if (chosen == visits.end()) return;
    dropped = std::move(chosen->second.exchange);
    visits.erase(chosen);
  }
  const uint64_t number = ++last_number;
  const int socket = exchange->socket();
  std::string source = SourceOf(exchange->peer());
  visits.emplace(number, Visit{.exchange = std::move(exchange), .source = std::move(source)});
  if (!Await(number, socket, Needs::kRead, EPOLL_CTL_ADD)) visits.erase(number);
}

void HttpServer::Impl::GoOn(uint64_t number) {
  std::unique_ptr<HttpExchange> exchange;
  {
    MutexLock lock(mutex);
    const auto visit = visits.find(number);
    if (visit == visits.end()) return;  // It was dropped in between.
    // It is not null: no other thread gets an event of it before Await below.
    exchange = std::move(visit->second.exchange);
  }
  Needs needs = Needs::kNothing;
  // Without memory for it the peer gets no answer.
  (void)RunsInMemory([&] {
    needs = exchange->Proceed([this](const HttpRequest& request) { return Answer(request); });
  });
  // It is found, because what a thread has is not dropped. From Await on another thread may be
  // woken for it: the lock makes that one wait until the exchange is back in its place.
  MutexLock lock(mutex);
  const auto visit = visits.find(number);
  if (needs == Needs::kNothing || !Await(number, exchange->socket(), needs, EPOLL_CTL_MOD)) {
    visits.erase(visit);
  } else {
    visit->second.exchange = std::move(exchange);
  }
}

void HttpServer::Impl::DropLate(Clock::time_point now) {
  std::vector<std::unique_ptr<HttpExchange>> late;  // Destroyed without the lock.
  MutexLock lock(mutex);
  if (now < next_look) return;
  next_look = now + kLookEvery;
  for (auto visit = visits.begin(); visit != visits.end();) {
    std::unique_ptr<HttpExchange>& exchange = visit->second.exchange;
    if (exchange == nullptr || exchange->deadline() > now) {
      ++visit;
      continue;
    }
    // Without memory for that it is destroyed here.
    (void)RunsInMemory([&] { late.push_back(std::move(exchange)); });
    visit = visits.erase(visit);
  }
}

HttpAnswer HttpServer::Impl::Answer(const HttpRequest& request) const {
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
  // DNS rebinding. Only a browser can be misled so, and every browser sends a host.
  if (!local || !options.access.tls_certificate.empty() || !host.has_value()) return true;
  const std::string name = host->substr(0, host->find(':'));
  in_addr v4;
  return absl::EqualsIgnoreCase(name, "localhost") || inet_pton(AF_INET, name.c_str(), &v4) == 1 ||
         absl::StartsWith(*host, "[");
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
  BALLAST_ASSIGN_OR_RETURN(impl->address, impl->listener.Add(address, memory, warn));
  const bool speaks_tls = tls != nullptr;
  if (speaks_tls) {
    const AccessOptions& access = options.access;
    impl->files.emplace(
        std::vector<WatchedFiles>{{absl::StrCat("the certificate of ", impl->address),
                                   {access.tls_certificate, access.tls_key, access.tls_client_ca},
                                   [owner = impl.get()] { return owner->ReadTlsAgain(); }}});
    MutexLock lock(impl->mutex);
    impl->tls = std::move(tls);
  }
  BALLAST_RETURN_IF_ERROR(impl->StartThreads());
  BALLAST_RETURN_IF_ERROR(impl->listener.Start(
      [owner = impl.get()](int connection) { owner->Take(FileDescriptor(connection)); }, warn,
      {.tls = speaks_tls, .held_until = nullptr, .most_newcomers = kMostNewcomers}));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() = default;

const std::string& HttpServer::address() const { return impl_->address; }

}  // namespace ballast::server
