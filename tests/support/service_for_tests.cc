#include "tests/support/service_for_tests.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/connect.h"
#include "client/session.h"

namespace ballast {
namespace {

server::ServerOptions ListenIn(Way way, server::ServerOptions options) {
  static std::atomic<int> sockets = 0;
  options.listen.clear();
  if (way == Way::kTcp) options.listen = {"127.0.0.1:0"};
  // Not in TempDir(), which may be deep: the path of a socket has at most 107 characters.
  if (way == Way::kUnixSocket) {
    options.listen = {absl::StrCat("unix:/tmp/ballast_test.", getpid(), ".", ++sockets)};
  }
  return options;
}

// Tests save where they like.
server::ServerOptions WithPaths(server::ServerOptions options) {
  options.allow_paths = true;
  return options;
}

}  // namespace

std::string Name(Way way) {
  switch (way) {
    case Way::kTcp:
      return "Tcp";
    case Way::kUnixSocket:
      return "UnixSocket";
    case Way::kInProcess:
      return "InProcess";
  }
  return "";
}

ServiceForTests::ServiceForTests(Way way, server::ServerOptions options)
    : ServiceForTests(ListenIn(way, std::move(options))) {}

ServiceForTests::ServiceForTests(const server::ServerOptions& options, FileSystem* file_system,
                                 int64_t memory_bytes, int threads)
    : engine_({.memory_limit_bytes = memory_bytes, .threads = threads, .file_system = file_system}),
      server_(server::Server::Start(engine_, WithPaths(options)).value()) {
  Use(NewChannel());
}

std::shared_ptr<grpc::Channel> ServiceForTests::NewChannel() {
  if (server_->addresses().empty()) return server_->InProcessChannel();
  return client::Connect(server_->addresses().front(), absl::Minutes(4)).value();
}

void ServiceForTests::Use(std::shared_ptr<grpc::Channel> channel) {
  channel_ = std::move(channel);
  jobs_ = v1::JobService::NewStub(channel_);
  train_ = v1::TrainService::NewStub(channel_);
  state_ = v1::StateService::NewStub(channel_);
}

std::string ServiceForTests::StateHash(const std::string& job) {
  return engine_.FindJob(job).value()->StateHash();
}

}  // namespace ballast
