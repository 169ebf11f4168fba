// A real service in this process, reached in each of the three ways.
#ifndef BALLAST_TESTS_CLIENT_SERVICE_FOR_TESTS_H_
#define BALLAST_TESTS_CLIENT_SERVICE_FOR_TESTS_H_

#include <unistd.h>

#include <memory>
#include <string>

#include "client/connect.h"
#include "client/session.h"
#include "cpu_optimizer_service/engine.h"
#include "server/server.h"

namespace ballast::client {

enum class Way { kTcp, kUnixSocket, kInProcess };

inline std::string Name(Way way) {
  return way == Way::kTcp ? "Tcp" : way == Way::kUnixSocket ? "UnixSocket" : "InProcess";
}

class ServiceForTests {
 public:
  explicit ServiceForTests(Way way) : way_(way), engine_({.memory_limit_bytes = 1 << 30}) {
    server::ServerOptions options;
    options.listen.clear();
    if (way == Way::kTcp) options.listen = {"127.0.0.1:0"};
    // Short: a socket's path has room for 107 characters only.
    if (way == Way::kUnixSocket) {
      options.listen = {"unix:/tmp/ballast_client_test." + std::to_string(getpid())};
    }
    options.seal_deadline_seconds = 0.05;
    options.seal_reminder_seconds = 0.05;
    server_ = server::Server::Start(engine_, options).value();
  }

  // A new one for each rank, as processes have.
  std::shared_ptr<grpc::Channel> Channel() {
    if (way_ == Way::kInProcess) return server_->InProcessChannel();
    return Connect(server_->addresses().at(0)).value();
  }
  server::Server& server() { return *server_; }
  Engine& engine() { return engine_; }

 private:
  const Way way_;
  Engine engine_;
  std::unique_ptr<server::Server> server_;
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_SERVICE_FOR_TESTS_H_
