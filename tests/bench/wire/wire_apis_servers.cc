#include "tests/bench/wire/wire_apis_servers.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/method_handler.h>
#include <grpcpp/support/sync_stream.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "server/transport_settings.h"

namespace ballast::bench {

grpc::ByteBuffer MessageAt(const SendMemory& memory, int64_t index) {
  const absl::Span<const std::byte> bytes = memory.message(index);
  const grpc::Slice slice(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE);
  return grpc::ByteBuffer(&slice, 1);
}

bool Consume(grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (!message.Dump(&slices).ok()) return false;
  size_t bytes = 0;
  uint64_t sum = 0;
  for (const grpc::Slice& slice : slices) {
    bytes += slice.size();
    for (const uint8_t byte : slice) sum += byte;
  }
  static std::atomic<uint64_t> seen = 0;  // So that the reading is not optimised away.
  seen.fetch_add(sum, std::memory_order_relaxed);
  message.Clear();
  return bytes == static_cast<size_t>(kMessageBytes);
}

namespace {

class CallbackExchange final : public grpc::ServerGenericBidiReactor {
 public:
  explicit CallbackExchange(const SendMemory& memory) : memory_(memory) { StartRead(&incoming_); }
  void OnReadDone(bool ok) override {
    const bool whole = ok && Consume(incoming_);
    {
      MutexLock lock(mutex_);
      owed_ += whole ? 1 : 0;
      ended_ = !whole;
    }
    Pump();
    if (whole) StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(mutex_);
      writing_ = false;
    }
    Pump();
  }
  void OnDone() override { delete this; }

 private:
  void Pump() {
    MutexLock lock(mutex_);
    if (writing_ || finished_) return;
    if (owed_ > 0) {
      writing_ = true;
      outgoing_ = MessageAt(memory_, owed_--);
      StartWrite(&outgoing_);
    } else if (ended_) {
      finished_ = true;
      Finish(grpc::Status::OK);
    }
  }

  const SendMemory& memory_;
  grpc::ByteBuffer incoming_;  // Of the read under way.
  Mutex mutex_;
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
  int64_t owed_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

class CallbackService final : public grpc::CallbackGenericService {
 public:
  explicit CallbackService(const SendMemory& memory) : memory_(memory) {}
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new CallbackExchange(memory_);
  }

 private:
  const SendMemory& memory_;
};

// A stream on the completion queue API.
class QueueExchange {
 public:
  QueueExchange(grpc::AsyncGenericService& service, grpc::ServerCompletionQueue& queue,
                const SendMemory& memory)
      : service_(service), queue_(queue), memory_(memory) {
    service_.RequestCall(&context_, &stream_, &queue_, &queue_, &begun_);
  }

 private:
  void Begun(bool ok) {
    if (!ok) return;                               // The server stops.
    new QueueExchange(service_, queue_, memory_);  // For the next call; they stay to the end.
    stream_.Read(&incoming_, &read_);
  }
  void Read(bool ok) {
    const bool whole = ok && Consume(incoming_);
    {
      MutexLock lock(mutex_);
      owed_ += whole ? 1 : 0;
      ended_ = !whole;
    }
    Pump();
    if (whole) stream_.Read(&incoming_, &read_);
  }
  void Written() {
    {
      MutexLock lock(mutex_);
      writing_ = false;
    }
    Pump();
  }
  void Pump() {
    MutexLock lock(mutex_);
    if (writing_ || finished_) return;
    if (owed_ > 0) {
      writing_ = true;
      stream_.Write(MessageAt(memory_, owed_--), &written_);
    } else if (ended_) {
      finished_ = true;
      stream_.Finish(grpc::Status::OK, &done_);
    }
  }

  grpc::AsyncGenericService& service_;
  grpc::ServerCompletionQueue& queue_;
  const SendMemory& memory_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  grpc::ByteBuffer incoming_;  // Of the read under way.
  Tag begun_ = [this](bool ok) { Begun(ok); };
  Tag read_ = [this](bool ok) { Read(ok); };
  Tag written_ = [this](bool) { Written(); };
  Tag done_ = [](bool) {};
  Mutex mutex_;
  int64_t owed_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

void Serve(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) (*static_cast<Tag*>(tag))(ok);
}

// The generated classes have no sync method on bytes, so it is put together as they would do it.
class SyncService final : public grpc::Service {
 public:
  explicit SyncService(const SendMemory& memory) : memory_(memory) {
    using Stream = grpc::ServerReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
    AddMethod(new grpc::internal::RpcServiceMethod(
        kExchangeMethod, grpc::internal::RpcMethod::BIDI_STREAMING,
        new grpc::internal::BidiStreamingHandler<SyncService, grpc::ByteBuffer, grpc::ByteBuffer>(
            [](SyncService* self, grpc::ServerContext*, Stream* stream) {
              return self->Exchange(*stream);
            },
            this)));
  }

 private:
  // A thread reads while this one writes.
  grpc::Status Exchange(grpc::ServerReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>& stream) {
    Mutex mutex;
    CondVar changed;
    int64_t owed = 0;
    bool ended = false;
    std::thread reader([&] {
      grpc::ByteBuffer incoming;
      bool whole = true;
      while (whole) {
        whole = stream.Read(&incoming) && Consume(incoming);
        MutexLock lock(mutex);
        owed += whole ? 1 : 0;
        ended = !whole;
        changed.NotifyOne();
      }
    });
    for (bool more = true; more;) {
      int64_t index = 0;
      {
        MutexLock lock(mutex);
        while (owed == 0 && !ended) changed.Wait(mutex);
        more = owed > 0;
        index = owed--;
      }
      if (more) stream.Write(MessageAt(memory_, index));
    }
    reader.join();
    return grpc::Status::OK;
  }

  const SendMemory& memory_;
};

// Serves until it is killed; writes the addresses, by API and family, to `fd` once it listens.
int RunServers(const std::string& folder, int fd) {
  server::ConfigureProcessForTransport();
  const SendMemory memory;
  CallbackService callback(memory);
  grpc::AsyncGenericService queued;
  SyncService sync(memory);
  std::vector<std::unique_ptr<grpc::Server>> servers;
  std::unique_ptr<grpc::ServerCompletionQueue> queue;
  std::string line;
  for (const std::string api : kApis) {
    grpc::ServerBuilder builder;
    server::ConfigureTransport(builder, int64_t{8} << 30);
    const std::string path = absl::StrCat("unix:", folder, "/", api);
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.AddListeningPort(path, grpc::InsecureServerCredentials());
    if (api == "callback") builder.RegisterCallbackGenericService(&callback);
    if (api == "completion_queue") {
      builder.RegisterAsyncGenericService(&queued);
      queue = builder.AddCompletionQueue();
    }
    if (api == "sync") builder.RegisterService(&sync);
    servers.push_back(builder.BuildAndStart());
    if (servers.back() == nullptr) return 1;
    absl::StrAppend(&line, "127.0.0.1:", port, " ", path, api == "sync" ? "\n" : " ");
  }
  new QueueExchange(queued, *queue, memory);
  // Two, so that reading and writing go on beside one another, as in the other two.
  std::thread pollers[] = {std::thread([&] { Serve(*queue); }),
                           std::thread([&] { Serve(*queue); })};
  if (write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) return 1;
  close(fd);
  for (std::thread& poller : pollers) poller.join();
  return 0;
}

}  // namespace

absl::Status ExchangeServers::Start() {
  folder_ = (std::filesystem::temp_directory_path() / "wire-apis.XXXXXX").string();
  int ends[2];
  if (mkdtemp(folder_.data()) == nullptr || pipe(ends) != 0) {
    return absl::ErrnoToStatus(errno, "cannot prepare the servers");
  }
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) return absl::ErrnoToStatus(errno, "cannot start the servers");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[0]);
    _exit(getppid() == parent ? RunServers(folder_, ends[1]) : 1);
  }
  close(ends[1]);
  std::string line;
  char c = 0;
  while (line.size() < 4096 && read(ends[0], &c, 1) == 1 && c != '\n') line.push_back(c);
  close(ends[0]);
  addresses_ = absl::StrSplit(line, ' ');
  const bool all = c == '\n' && addresses_.size() == std::size(kApis) * std::size(kFamilies);
  return all ? absl::OkStatus() : absl::UnavailableError("the servers did not start");
}

ExchangeServers::~ExchangeServers() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

const std::string& ExchangeServers::address(size_t api, size_t family) const {
  return addresses_[api * std::size(kFamilies) + family];
}

}  // namespace ballast::bench
