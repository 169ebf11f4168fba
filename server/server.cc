#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <spdlog/spdlog.h>

#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/deadline.h"
#include "server/address.h"
#include "server/call_pool.h"
#include "server/checkpoint_paths.h"
#include "server/interceptors.h"
#include "server/jobs/job_service.h"
#include "server/jobs/state_service.h"
#include "server/listener.h"
#include "server/reset_watch.h"
#include "server/shared_memory/shared_memory_server.h"
#include "server/train/seal_watch.h"
#include "server/train/train_service.h"
#include "server/transport_settings.h"

namespace ballast::server {
namespace {

absl::StatusOr<std::vector<Address>> ParseAddresses(const ServerOptions& options) {
  std::vector<Address> addresses;
  for (const std::string& text : options.listen) {
    BALLAST_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
    if (!options.insecure && !IsLocal(address)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "refusing to listen on ", text,
          ": other hosts could reach it without encryption; use a loopback address or --insecure"));
    }
    if (!address.unix_path.empty()) BALLAST_RETURN_IF_ERROR(CheckUnixSocketIsFree(address));
    addresses.push_back(std::move(address));
  }
  return addresses;
}

// gRPC's plugins belong to the process, and are added to the servers that are built after this.
void EnablePlugins() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

std::unique_ptr<SharedMemoryServer> StartSharedMemoryServer(const Engine& engine,
                                                            const ServerOptions& options) {
  if (!options.shared_memory) return nullptr;
  auto shared_memory = SharedMemoryServer::Open(engine.instance_id());
  if (shared_memory.ok()) return *std::move(shared_memory);
  spdlog::warn("no memory is shared with workers on this host: {}",
               std::string(shared_memory.status().message()));
  return nullptr;
}

}  // namespace

struct Server::Impl {
  Impl(Engine& engine, std::unique_ptr<SharedMemoryServer> shared_memory, CheckpointPaths paths)
      : checkpoint_paths(std::move(paths)),
        shared_memory_server(std::move(shared_memory)),
        job_service(engine, pools, shared_memory_server.get()),
        train_service(engine, pools),
        state_service(engine, pools, checkpoint_paths) {}

  absl::Status Listen(const std::vector<Address>& parsed, int64_t memory_limit_bytes);

  const CheckpointPaths checkpoint_paths;
  std::unique_ptr<SharedMemoryServer> shared_memory_server;  // Nullable.
  CallPools pools;
  ResetWatch resets;
  JobService job_service;
  TrainService train_service;
  StateService state_service;
  std::vector<std::string> addresses;
  std::unique_ptr<grpc::Server> grpc_server;
  std::unique_ptr<Listener> listener;
  std::optional<SealWatch> seal_watch;
  std::once_flag shut_down;
};

absl::Status Server::Impl::Listen(const std::vector<Address>& parsed, int64_t memory_limit_bytes) {
  grpc::ServerBuilder builder;
  ConfigureTransport(builder, memory_limit_bytes);
  InterceptCalls(builder, resets);
  auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      grpc::InsecureServerCredentials());
  builder.RegisterService(&job_service);
  builder.RegisterService(&train_service);
  builder.RegisterService(&state_service);
  listener = std::make_unique<Listener>();
  for (const Address& address : parsed) {
    BALLAST_ASSIGN_OR_RETURN(addresses.emplace_back(), listener->Add(address));
  }
  grpc_server = builder.BuildAndStart();
  if (grpc_server == nullptr) return absl::InternalError("gRPC could not start a server");
  return listener->Start(
      [acceptor = std::shared_ptr(std::move(acceptor))](int connection) {
        grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
        parameters.fd = connection;
        acceptor->HandleNewConnection(&parameters);
      },
      [](const std::string& line) { spdlog::warn("{}", line); });
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(Engine& engine,
                                                      const ServerOptions& options) {
  ConfigureProcessForTransport();
  EnablePlugins();
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Address> addresses, ParseAddresses(options));
  std::vector<std::string> unix_sockets;
  for (const Address& address : addresses) {
    if (!address.unix_path.empty()) unix_sockets.push_back(address.unix_path);
  }
  auto impl = std::make_unique<Impl>(
      engine, StartSharedMemoryServer(engine, options),
      // Without an address, only this process itself reaches the server.
      CheckpointPaths(engine.checkpoints(), options.allow_paths || addresses.empty(),
                      std::move(unix_sockets)));
  BALLAST_RETURN_IF_ERROR(impl->Listen(addresses, engine.memory().limit_bytes()));
  impl->seal_watch.emplace(engine, options.seal_deadline_seconds, options.seal_reminder_seconds);
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() { Shutdown(0); }

const std::vector<std::string>& Server::addresses() const { return impl_->addresses; }

std::shared_ptr<grpc::Channel> Server::InProcessChannel() {
  return impl_->grpc_server->InProcessChannel(grpc::ChannelArguments());
}

void Server::SetServing(bool serving) {
  if (auto* health = impl_->grpc_server->GetHealthCheckService()) health->SetServingStatus(serving);
}

void Server::Shutdown(double grace_seconds) {
  std::call_once(impl_->shut_down, [&] {
    impl_->listener.reset();
    impl_->seal_watch.reset();  // No reminders to streams that are being cancelled.
    impl_->grpc_server->Shutdown(proto::Deadline(absl::Seconds(grace_seconds)));
    impl_->grpc_server->Wait();  // For every call; those that are queued in a pool still run.
    impl_->shared_memory_server.reset();  // No call asks for offers any more.
  });
}

}  // namespace ballast::server
