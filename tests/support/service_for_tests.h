// A real service in this process: an engine with a server around it.
//
//   ServiceForTests service;                     // Over TCP.
//   service.jobs().ListJobs(...);                // Its calls, by their stubs.
//   client::Session::Open(service.NewChannel(), ...);
#ifndef BALLAST_TESTS_SUPPORT_SERVICE_FOR_TESTS_H_
#define BALLAST_TESTS_SUPPORT_SERVICE_FOR_TESTS_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "ballast/v1/jobs.grpc.pb.h"
#include "ballast/v1/state.grpc.pb.h"
#include "ballast/v1/train.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "server/server.h"

namespace ballast {

inline constexpr int64_t kTestMemoryBytes = int64_t{256} << 20;

enum class Way { kTcp, kUnixSocket, kInProcess };
std::string Name(Way way);

class ServiceForTests {
 public:
  // `file_system` outlives it; null: the system's files. `threads`: the engine's.
  explicit ServiceForTests(const server::ServerOptions& options = {.listen = {"127.0.0.1:0"}},
                           FileSystem* file_system = nullptr,
                           int64_t memory_bytes = kTestMemoryBytes, int threads = 2);
  // Reachable in this way; `options.listen` is not used.
  explicit ServiceForTests(Way way, server::ServerOptions options = {});

  Engine& engine() { return engine_; }
  server::Server& server() { return *server_; }
  // To the first address, or without a socket if there is none. A channel of its own, as a process
  // has.
  std::shared_ptr<grpc::Channel> NewChannel();

  v1::JobService::Stub& jobs() { return *jobs_; }
  v1::TrainService::Stub& train() { return *train_; }
  v1::StateService::Stub& state() { return *state_; }
  // What the stubs use.
  std::shared_ptr<grpc::Channel> channel() { return channel_; }
  void Use(std::shared_ptr<grpc::Channel> channel);

  std::string StateHash(const std::string& job);

 private:
  Engine engine_;
  std::unique_ptr<server::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::TrainService::Stub> train_;
  std::unique_ptr<v1::StateService::Stub> state_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_SERVICE_FOR_TESTS_H_
