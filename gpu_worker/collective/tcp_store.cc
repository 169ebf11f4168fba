#include "gpu_worker/collective/tcp_store.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/mutex.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/collective/socket.h"

// A message is a kind, two lengths and two strings. A client says hello (rank and world size in
// `first` and `second`), then asks; the server answers every message with kOk or kError and a
// string.
namespace ballast::worker {
namespace {

constexpr uint32_t kMaxStringBytes = 64 << 10;
constexpr int kMaxKeysPerRank = 64;
constexpr std::chrono::seconds kHelloTimeout{30};
constexpr std::chrono::seconds kPatience{5};  // Waiting longer is said on stderr.
constexpr char kHostOfRankZero[] = "host of rank 0";

enum class Kind : uint32_t { kHello = 0xba11a570, kSet, kGet, kOk, kError };

struct Message {
  Kind kind;
  std::string first;
  std::string second;
};

absl::Span<const std::byte> Bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

absl::Status Send(const Socket& socket, const Message& message, Deadline deadline) {
  const std::array<uint32_t, 3> header = {static_cast<uint32_t>(message.kind),
                                          static_cast<uint32_t>(message.first.size()),
                                          static_cast<uint32_t>(message.second.size())};
  std::string bytes(reinterpret_cast<const char*>(header.data()), sizeof(header));
  absl::StrAppend(&bytes, message.first, message.second);
  return socket.Write(Bytes(bytes), deadline);
}

absl::StatusOr<Message> Receive(const Socket& socket, Deadline deadline) {
  std::array<uint32_t, 3> header;
  BALLAST_RETURN_IF_ERROR(
      socket.Read({reinterpret_cast<std::byte*>(header.data()), sizeof(header)}, deadline));
  if (header[0] < static_cast<uint32_t>(Kind::kHello) ||
      header[0] > static_cast<uint32_t>(Kind::kError) || header[1] > kMaxStringBytes ||
      header[2] > kMaxStringBytes) {
    return absl::InvalidArgumentError("the other end is not a ballast-worker of this version");
  }
  Message message{.kind = static_cast<Kind>(header[0]), .first = {}, .second = {}};
  message.first.resize(header[1]);
  message.second.resize(header[2]);
  for (std::string* text : {&message.first, &message.second}) {
    BALLAST_RETURN_IF_ERROR(
        socket.Read({reinterpret_cast<std::byte*>(text->data()), text->size()}, deadline));
  }
  return message;
}

// The keys, shared by the threads that serve the other ranks and by rank 0 itself.
class Table {
 public:
  explicit Table(size_t max_keys) : max_keys_(max_keys) {}

  absl::Status Set(const std::string& key, const std::string& value) {
    MutexLock lock(mutex_);
    if (values_.size() >= max_keys_) return absl::ResourceExhaustedError("too many keys");
    values_[key] = value;
    changed_.NotifyAll();
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline) {
    MutexLock lock(mutex_);
    while (true) {
      if (const auto found = values_.find(key); found != values_.end()) return found->second;
      if (closed_) return absl::CancelledError("rank 0 ended");
      if (!ended_.empty()) {
        return absl::UnavailableError(absl::StrCat("rank ", *ended_.begin(), " ended; see why"));
      }
      if (!changed_.WaitUntil(mutex_, deadline) && !values_.contains(key)) {
        return absl::DeadlineExceededError(absl::StrCat("nobody set the key ", key, " in time"));
      }
    }
  }

  // Refuses a rank that is there already. `host` is where it reached rank 0.
  absl::Status Join(int rank, std::string host) {
    MutexLock lock(mutex_);
    if (ranks_.insert(rank).second) {
      reached_at_.insert(std::move(host));
      changed_.NotifyAll();
      return absl::OkStatus();
    }
    return absl::AlreadyExistsError(
        absl::StrCat("two workers were started with RANK=", rank, "; give each its own"));
  }

  // A rank's connection ended. Who waits for a key waits for all ranks, and not for that any more.
  void Leave(int rank) {
    MutexLock lock(mutex_);
    ended_.insert(rank);
    changed_.NotifyAll();
  }

  // Keeps why a rank was refused, for the error of the one that waits for it.
  void Refuse(const std::string& reason) {
    MutexLock lock(mutex_);
    refusals_.insert(reason);
  }

  // Where the other ranks reached rank 0, when all have: the address that other hosts use, if any.
  absl::StatusOr<std::string> AwaitRanks(int world_size, Deadline deadline) {
    const Deadline patience = std::chrono::steady_clock::now() + kPatience;
    bool told = false;
    MutexLock lock(mutex_);
    while (ranks_.size() < static_cast<size_t>(world_size)) {
      if (changed_.WaitUntil(mutex_, told ? deadline : std::min(deadline, patience))) continue;
      const auto now = std::chrono::steady_clock::now();
      if (now >= deadline) return absl::DeadlineExceededError(NotCome(world_size));
      if (told || now < patience) continue;
      told = true;
      std::fprintf(stderr, "ballast-worker: rank 0: waiting for %s\n", Missing(world_size).c_str());
    }
    for (const std::string& host : reached_at_) {
      if (!IsLoopback(host)) return host;
    }
    return *reached_at_.begin();
  }

  void Close() {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

 private:
  // "rank 2", or "rank 2 and 5 more".
  std::string Missing(int world_size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    int first = 0;
    while (ranks_.contains(first)) ++first;
    const size_t more = world_size - ranks_.size() - 1;
    return absl::StrCat("rank ", first, more > 0 ? absl::StrCat(" and ", more, " more") : "");
  }
  std::string NotCome(int world_size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::string text =
        absl::StrCat("rank 0: ", Missing(world_size), " did not come in time; start ", world_size,
                     " workers with the same MASTER_ADDR and MASTER_PORT");
    for (const std::string& refusal : refusals_) absl::StrAppend(&text, "; refused: ", refusal);
    return text;
  }

  const size_t max_keys_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  std::set<int> ranks_ ABSL_GUARDED_BY(mutex_) = {0};
  std::set<int> ended_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> reached_at_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> refusals_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

class ServedStore final : public TcpStore {
 public:
  ServedStore(const TcpStoreOptions& options, Socket listener)
      : options_(options),
        listener_(std::move(listener)),
        table_(static_cast<size_t>(options.world_size) * kMaxKeysPerRank) {
    acceptor_ = std::thread([this] { AcceptAll(); });
  }

  ~ServedStore() override {
    table_.Close();
    listener_.Shutdown();
    acceptor_.join();
    // No connection is added any more: the acceptor has ended.
    for (Connection& connection : connections_) {
      connection.socket.Shutdown();
      connection.thread.join();
    }
  }

  absl::Status Set(const std::string& key, const std::string& value) override {
    return table_.Set(key, value);
  }
  absl::StatusOr<std::string> Get(const std::string& key) override {
    return table_.Get(key, std::chrono::steady_clock::now() + options_.timeout);
  }
  int port() const override { return listener_.port(); }
  absl::StatusOr<std::string> OwnHost() override {
    BALLAST_ASSIGN_OR_RETURN(
        std::string host, table_.AwaitRanks(options_.world_size,
                                            std::chrono::steady_clock::now() + options_.timeout));
    BALLAST_RETURN_IF_ERROR(table_.Set(kHostOfRankZero, host));
    return host;
  }

 private:
  struct Connection {
    Socket socket;
    std::thread thread;
  };

  void AcceptAll() {
    // A few more than there are ranks, so that one who is refused does not take another's place.
    const size_t most = 2 * static_cast<size_t>(options_.world_size) + 8;
    connections_.reserve(most);
    while (connections_.size() < most) {
      absl::StatusOr<Socket> accepted = listener_.Accept();
      if (!accepted.ok()) return;
      Connection& connection = connections_.emplace_back();
      connection.socket = *std::move(accepted);
      connection.thread = std::thread([this, &connection] { Serve(connection.socket); });
    }
  }

  // Answers one rank until it goes, or at once closes the connection of one who is none.
  void Serve(const Socket& socket) {
    AnswerAll(socket);
    socket.Shutdown();
  }

  void AnswerAll(const Socket& socket) {
    const auto deadline = [this] { return std::chrono::steady_clock::now() + options_.timeout; };
    absl::StatusOr<Message> hello =
        Receive(socket, std::chrono::steady_clock::now() + kHelloTimeout);
    if (!hello.ok()) return;
    absl::Status answer = Welcome(*hello, socket);
    if (!answer.ok()) table_.Refuse(std::string(answer.message()));
    std::string value;
    while (true) {
      const Message reply{.kind = answer.ok() ? Kind::kOk : Kind::kError,
                          .first = answer.ok() ? value : std::string(answer.message()),
                          .second = {}};
      if (!Send(socket, reply, deadline()).ok() || !answer.ok()) return;
      // A rank may compute for hours between two questions; it ends when its connection does.
      absl::StatusOr<Message> question = Receive(socket, Deadline::max());
      if (!question.ok()) return table_.Leave(std::atoi(hello->first.c_str()));
      answer = Answer(*question, value);
    }
  }

  absl::Status Welcome(const Message& hello, const Socket& socket) {
    if (hello.kind != Kind::kHello) return absl::InvalidArgumentError("say hello first");
    const int rank = std::atoi(hello.first.c_str());
    if (hello.second != absl::StrCat(options_.world_size)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", rank, " was started with WORLD_SIZE=", hello.second, " but rank 0 with ",
          options_.world_size, "; start all workers with the same WORLD_SIZE"));
    }
    if (rank < 1 || rank >= options_.world_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("RANK=", hello.first, " is not within 1 to ", options_.world_size - 1));
    }
    return table_.Join(rank, socket.host());
  }

  absl::Status Answer(const Message& question, std::string& value) {
    value.clear();
    if (question.kind == Kind::kSet) return table_.Set(question.first, question.second);
    if (question.kind != Kind::kGet) return absl::InvalidArgumentError("expected a set or a get");
    BALLAST_ASSIGN_OR_RETURN(
        value, table_.Get(question.first, std::chrono::steady_clock::now() + options_.timeout));
    return absl::OkStatus();
  }

  const TcpStoreOptions options_;
  const Socket listener_;
  Table table_;
  std::vector<Connection> connections_;  // Of the acceptor; of the destructor when it has ended.
  std::thread acceptor_;
};

class ConnectedStore final : public TcpStore {
 public:
  ConnectedStore(const TcpStoreOptions& options, Socket socket)
      : options_(options), socket_(std::move(socket)) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    return Ask({.kind = Kind::kSet, .first = key, .second = value}).status();
  }
  absl::StatusOr<std::string> Get(const std::string& key) override {
    return Ask({.kind = Kind::kGet, .first = key, .second = {}});
  }
  absl::Status SayHello() {
    return Ask({.kind = Kind::kHello,
                .first = absl::StrCat(options_.rank),
                .second = absl::StrCat(options_.world_size)})
        .status();
  }
  int port() const override { return options_.port; }
  absl::StatusOr<std::string> OwnHost() override {
    // On the host of rank 0 the connection may be a loopback, though other hosts take part.
    std::string host = socket_.host();
    if (!IsLoopback(host)) return host;
    absl::StatusOr<std::string> rank_0 = Get(kHostOfRankZero);
    if (rank_0.ok()) return rank_0;
    return Annotate(rank_0.status(),
                    absl::StrCat("rank ", options_.rank, ": rank 0 ended or waits for others"));
  }

 private:
  absl::StatusOr<std::string> Ask(const Message& question) {
    // Longer than the server waits for a key, so that its reason arrives.
    const Deadline deadline =
        std::chrono::steady_clock::now() + options_.timeout + std::chrono::seconds(5);
    BALLAST_RETURN_IF_ERROR(Send(socket_, question, deadline));
    BALLAST_ASSIGN_OR_RETURN(Message reply, Receive(socket_, deadline));
    if (reply.kind != Kind::kOk) return absl::FailedPreconditionError(reply.first);
    return std::move(reply.first);
  }

  const TcpStoreOptions options_;
  const Socket socket_;
};

absl::StatusOr<Socket> ListenForRanks(const std::string& host, int port) {
  {
    BALLAST_ASSIGN_OR_RETURN(Socket listener, Socket::Listen(host, port));
    if (host == "localhost" || IsLoopback(host) || !IsLoopback(listener.host())) return listener;
  }
  // Debian maps a host's own name to 127.0.1.1, where no other host would reach it.
  return Socket::Listen("0.0.0.0", port);
}

absl::StatusOr<Socket> ConnectToRankZero(const TcpStoreOptions& options) {
  const Deadline start = std::chrono::steady_clock::now();
  const Deadline deadline = start + options.timeout;
  if (options.timeout > kPatience) {
    absl::StatusOr<Socket> socket = Socket::Connect(options.host, options.port, start + kPatience);
    if (socket.status().code() != absl::StatusCode::kDeadlineExceeded) return socket;
    std::fprintf(stderr, "ballast-worker: rank %d: waiting for rank 0 at %s:%d\n", options.rank,
                 options.host.c_str(), options.port);
  }
  return Socket::Connect(options.host, options.port, deadline);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::Open(const TcpStoreOptions& options) {
  if (options.rank == 0) {
    BALLAST_ASSIGN_OR_RETURN(Socket listener, ListenForRanks(options.host, options.port));
    return std::make_unique<ServedStore>(options, std::move(listener));
  }
  absl::StatusOr<Socket> socket = ConnectToRankZero(options);
  if (!socket.ok()) {
    return Annotate(socket.status(), absl::StrCat("rank ", options.rank,
                                                  " cannot reach rank 0: start it, with the "
                                                  "same MASTER_ADDR and MASTER_PORT"));
  }
  auto store = std::make_unique<ConnectedStore>(options, *std::move(socket));
  if (const absl::Status welcome = store->SayHello(); !welcome.ok()) {
    return Annotate(welcome, absl::StrCat("rank ", options.rank, " was not let in by rank 0"));
  }
  return store;
}

}  // namespace ballast::worker
