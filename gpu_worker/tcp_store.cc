#include "gpu_worker/tcp_store.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/mutex.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/socket.h"

// A message is a kind, two lengths and two strings. A client says hello (rank and world size in
// `first` and `second`), then asks; the server answers every message with kOk or kError and a
// string.
namespace ballast::worker {
namespace {

constexpr uint32_t kMaxStringBytes = 64 << 10;
constexpr int kMaxKeysPerRank = 64;

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
      if (!changed_.WaitUntil(mutex_, deadline) && !values_.contains(key)) {
        return absl::DeadlineExceededError(absl::StrCat("nobody set the key ", key, " in time"));
      }
    }
  }

  // Refuses a rank that is there already.
  absl::Status Join(int rank) {
    MutexLock lock(mutex_);
    if (ranks_.insert(rank).second) return absl::OkStatus();
    return absl::AlreadyExistsError(
        absl::StrCat("two workers were started with RANK=", rank, "; give each its own"));
  }

  void Close() {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

 private:
  const size_t max_keys_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  std::set<int> ranks_ ABSL_GUARDED_BY(mutex_) = {0};
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

  // Answers one rank until it goes.
  void Serve(const Socket& socket) {
    const auto deadline = [this] { return std::chrono::steady_clock::now() + options_.timeout; };
    absl::StatusOr<Message> hello = Receive(socket, deadline());
    if (!hello.ok()) return;
    absl::Status answer = Welcome(*hello);
    std::string value;
    while (true) {
      const Message reply{.kind = answer.ok() ? Kind::kOk : Kind::kError,
                          .first = answer.ok() ? value : std::string(answer.message()),
                          .second = {}};
      if (!Send(socket, reply, deadline()).ok() || !answer.ok()) return;
      // A rank may compute for hours between two questions; it ends when its connection does.
      absl::StatusOr<Message> question = Receive(socket, Deadline::max());
      if (!question.ok()) return;
      answer = Answer(*question, value);
    }
  }

  absl::Status Welcome(const Message& hello) {
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
    return table_.Join(rank);
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

}  // namespace

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::Open(const TcpStoreOptions& options) {
  if (options.rank == 0) {
    BALLAST_ASSIGN_OR_RETURN(Socket listener, Socket::Listen(options.host, options.port));
    return std::make_unique<ServedStore>(options, std::move(listener));
  }
  absl::StatusOr<Socket> socket = Socket::Connect(
      options.host, options.port, std::chrono::steady_clock::now() + options.timeout);
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
