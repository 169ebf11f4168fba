#include "server/server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"
#include "proto/deadline.h"
#include "server/access/access.h"
#include "server/access/file_watch.h"
#include "server/access/tls.h"
#include "server/access/unix_users.h"
#include "server/address.h"
#include "server/call_pool.h"
#include "server/checkpoint_paths.h"
#include "server/cluster/registration.h"
#include "server/jobs/job_service.h"
#include "server/jobs/state_service.h"
#include "server/listener.h"
#include "server/members/member_links.h"
#include "server/members/member_service.h"
#include "server/reflection.h"
#include "server/shared_memory/shared_memory_server.h"
#include "server/train/train_service.h"
#include "server/transport_settings.h"
#include "server/unknown_methods.h"

namespace ballast::server {
namespace {

// Whether those who reach the address are meant to.
absl::Status CheckOpenness(const Address& address, const ServerOptions& options) {
  const AccessOptions& access = options.access;
  const bool tls = !access.tls_certificate.empty();
  // Also with --insecure: over TCP without TLS neither a token nor a certificate counts.
  if (!access.roles.empty() && !tls && address.unix_path.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("with --roles-file the service would refuse every call to ", address.text,
                     ", because callers cannot identify themselves there: give --tls-cert and "
                     "--tls-key, or listen on a unix socket"));
  }
  const bool callers_are_known = !access.roles.empty() || !access.tls_client_ca.empty();
  if (IsLocal(address) || options.insecure || (tls && callers_are_known)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "refusing to listen on ", address.text, ": other hosts could reach it ",
      tls ? "without authentication; give --tls-client-ca or --roles-file"
          : "without encryption; give --tls-cert, --tls-key and --tls-client-ca or --roles-file",
      ", use a loopback address, or --insecure"));
}

absl::StatusOr<std::vector<Address>> ParseAddresses(const ServerOptions& options) {
  std::vector<Address> addresses;
  for (const std::string& text : options.listen) {
    BALLAST_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
    BALLAST_RETURN_IF_ERROR(CheckOpenness(address, options));
    addresses.push_back(std::move(address));
  }
  if (!options.advertise.empty()) BALLAST_RETURN_IF_ERROR(CheckAdvertised(options.advertise));
  return addresses;
}

// The files that are read again when they change.
std::vector<WatchedFiles> FilesOf(Access& access, Tls& tls) {
  const AccessOptions& options = access.options();
  const auto read_access = [&access]() -> absl::StatusOr<std::string> {
    BALLAST_RETURN_IF_ERROR(access.ReadAgain());
    // Only a warning: while a service runs, the token of a role may be taken away on purpose.
    if (const absl::Status there = access.CheckThatTokensAreThere(); !there.ok()) {
      spdlog::warn("{}", std::string(there.message()));
    }
    return access.ToLine();
  };
  const auto read_tls = [&tls, path = options.tls_certificate]() -> absl::StatusOr<std::string> {
    BALLAST_RETURN_IF_ERROR(tls.ReadAgain());
    return path;
  };
  return {{"roles and tokens", {options.roles, options.tokens}, read_access},
          {"the certificate",
           {options.tls_certificate, options.tls_key, options.tls_client_ca},
           read_tls}};
}

// Null: none.
absl::StatusOr<std::unique_ptr<cluster::Cluster>> OpenCluster(const ServerOptions& options,
                                                              const std::vector<Address>& listen) {
  if (options.cluster.empty()) return nullptr;
  const bool is_reached = !options.advertise.empty() ||
                          std::any_of(listen.begin(), listen.end(), [](const Address& address) {
                            return address.unix_path.empty();
                          });
  if (!is_reached) {
    return absl::InvalidArgumentError(
        "flag --cluster: no host reaches a unix socket; listen on HOST:PORT as well");
  }
  BALLAST_ASSIGN_OR_RETURN(const cluster::Address address, cluster::ParseAddress(options.cluster));
  absl::StatusOr<std::unique_ptr<cluster::Cluster>> opened =
      cluster::Cluster::Open(address, options.etcd);
  if (opened.ok()) return opened;
  return Annotate(opened.status(), "flag --cluster");
}

absl::StatusOr<std::unique_ptr<Access>> OpenAccess(const ServerOptions& options) {
  // The audit goes where the log goes, whatever the log's level.
  const std::shared_ptr<spdlog::logger> audit =
      spdlog::default_logger()->clone(spdlog::default_logger()->name());
  audit->set_level(spdlog::level::info);
  return Access::Open(
      options.access, [audit](const std::string& line) { audit->info("{}", line); },
      [](const std::string& line) { spdlog::warn("{}", line); });
}

// Each job whose first rank has sealed `deadline_seconds` ago or earlier tells its sealed ranks
// which ones they wait for.
void RemindSealedRanks(const Engine& engine, double deadline_seconds) {
  for (const std::shared_ptr<Job>& job : engine.ListJobs()) {
    const std::optional<double> seconds = job->SecondsSinceFirstSeal();
    if (seconds.has_value() && *seconds >= deadline_seconds) job->TellWaiting();
  }
}

bool IsUnixSocket(int connection) {
  int domain = 0;
  socklen_t bytes = sizeof(domain);
  return getsockopt(connection, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 && domain == AF_UNIX;
}

std::unique_ptr<SharedMemoryServer> StartSharedMemoryServer(const Engine& engine,
                                                            const ServerOptions& options) {
  if (!options.shared_memory) return nullptr;
  auto shared_memory = SharedMemoryServer::Open(engine.instance_id(), {}, engine.named_memory());
  if (shared_memory.ok()) return *std::move(shared_memory);
  spdlog::warn("no memory is shared with workers on this host: {}",
               std::string(shared_memory.status().message()));
  return nullptr;
}

}  // namespace

struct Server::Impl {
  Impl(Engine& engine, std::unique_ptr<Access> who, std::unique_ptr<Tls> tcp,
       std::unique_ptr<SharedMemoryServer> shared_memory, CheckpointPaths paths)
      : access(std::move(who)),
        tls(std::move(tcp)),
        checkpoint_paths(std::move(paths)),
        shared_memory_server(std::move(shared_memory)),
        job_service(engine, *access, pools, checkpoint_paths, shared_memory_server.get()),
        train_service(engine, *access, pools),
        member_service(engine, *access, pools),
        state_service(engine, *access, pools, checkpoint_paths),
        reflection(pools),
        engine(engine) {}

  absl::Status Listen(const std::vector<Address>& parsed, const Engine& engine,
                      const ServerOptions& options);

  // Members end in the reverse of this order: what a call uses is here before what begins calls.
  const std::unique_ptr<Access> access;
  const std::unique_ptr<Tls> tls;
  std::optional<FileWatch> access_files;
  const CheckpointPaths checkpoint_paths;
  std::unique_ptr<SharedMemoryServer> shared_memory_server;  // Nullable.
  CallPools pools;
  JobService job_service;
  TrainService train_service;
  MemberService member_service;
  StateService state_service;
  Reflection reflection;
  std::vector<std::string> addresses;
  std::unique_ptr<grpc::CallbackGenericService> other_methods;
  std::unique_ptr<grpc::Server> grpc_server;
  std::unique_ptr<Listener> listener;
  std::optional<PeriodicThread> seal_reminders;
  Engine& engine;
  std::unique_ptr<MemberLinks> member_links;
  std::unique_ptr<cluster::Cluster> cluster;   // Until `registration` has it.
  std::unique_ptr<Registration> registration;  // Nullable.
  std::atomic<bool> serving = true;
  std::once_flag shut_down;
};

absl::Status Server::Impl::Listen(const std::vector<Address>& parsed, const Engine& engine,
                                  const ServerOptions& options) {
  grpc::ServerBuilder builder;
  ConfigureTransport(builder, engine.memory().limit_bytes());
  other_methods = AnswerUnknownMethods(builder);
  // Acceptors are parts of the builder, so all of them are made before the server is.
  Acceptor tcp = MakeAcceptor(builder, tls->credentials());
  auto unix_users = std::make_shared<UnixUsers>(
      builder, [this](const std::string& principal) { return access->Knows(principal); });
  builder.RegisterService(&job_service);
  builder.RegisterService(&train_service);
  builder.RegisterService(&member_service);
  builder.RegisterService(&state_service);
  builder.RegisterService(&reflection);
  for (grpc::Service* service : options.more_services) builder.RegisterService(service);
  ListeningSockets sockets;
  const auto warn = [](const std::string& line) { spdlog::warn("{}", line); };
  // Addresses that are listened on no more are given up first, as a new one may need their port,
  // and are forgotten last: if a new one fails, the next start still finds them.
  if (engine.named_memory() != nullptr) sockets.GiveUpKept(parsed, *engine.named_memory());
  for (const Address& address : parsed) {
    BALLAST_ASSIGN_OR_RETURN(addresses.emplace_back(),
                             sockets.Add(address, engine.named_memory(), warn));
  }
  if (engine.named_memory() != nullptr) sockets.ForgetKept(*engine.named_memory());
  const std::string advertised =
      options.advertise.empty() ? AdvertisedOf(addresses) : options.advertise;
  job_service.IsReachedAt(advertised);
  if (cluster != nullptr) {
    registration = std::make_unique<Registration>(this->engine, std::move(cluster), advertised);
    job_service.UseRegistration(registration.get());
  }
  // The builder has no address: all connections come through the acceptors.
  grpc_server = builder.BuildAndStart();
  if (grpc_server == nullptr) {
    return absl::InternalError(
        "the server for calls could not be started; --log-level=debug says why");
  }
  // Only now is there something that takes connections. Until now they have queued.
  listener = std::make_unique<Listener>();
  return listener->Start(
      std::move(sockets),
      [tcp = std::move(tcp), unix_users = std::move(unix_users)](int connection) {
        if (IsUnixSocket(connection)) return unix_users->Take(connection);
        EndIfPeerTakesNothing(connection);
        tcp(connection);
      },
      warn);
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(Engine& engine,
                                                      const ServerOptions& options) {
  ConfigureProcessForTransport();
  grpc::EnableDefaultHealthCheckService(true);  // For all servers that are built after this.
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Address> addresses, ParseAddresses(options));
  // Over these a caller may name paths, if nobody but this user can connect (checkpoint_paths.h).
  std::vector<std::string> unix_sockets;
  for (const Address& address : addresses) {
    if (address.unix_path.empty()) continue;
    // A socket that an earlier process left is open and would answer, but it is to be taken over.
    if (!ListeningSockets::IsKept(address, engine.named_memory())) {
      BALLAST_RETURN_IF_ERROR(CheckUnixSocketIsFree(address));
    }
    unix_sockets.push_back(address.unix_path);
  }
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<Tls> tls, Tls::Open(options.access));
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<Access> access, OpenAccess(options));
  auto impl = std::make_unique<Impl>(
      engine, std::move(access), std::move(tls), StartSharedMemoryServer(engine, options),
      // Without an address, only this process itself reaches the server.
      CheckpointPaths(engine.checkpoints(), options.allow_paths || addresses.empty(),
                      std::move(unix_sockets)));
  BALLAST_ASSIGN_OR_RETURN(impl->cluster, OpenCluster(options, addresses));
  impl->member_links = std::make_unique<MemberLinks>(impl->tls->channel_credentials());
  BALLAST_RETURN_IF_ERROR(impl->Listen(addresses, engine, options));
  engine.UseDialer(impl->member_links.get());
  if (impl->registration != nullptr) impl->registration->Begin();
  impl->seal_reminders.emplace(
      "remind-of-seals", absl::ToChronoNanoseconds(absl::Seconds(options.seal_reminder_seconds)),
      [&engine, deadline_seconds = options.seal_deadline_seconds] {
        RemindSealedRanks(engine, deadline_seconds);
      });
  // After Listen: the watch reads `tls` again on a thread of its own, and Tls is not thread-safe.
  if (impl->access->has_roles() || impl->access->has_tls()) {
    impl->access_files.emplace(FilesOf(*impl->access, *impl->tls));
  }
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

absl::Status Server::Check(const ServerOptions& options, bool is_new) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Address> addresses, ParseAddresses(options));
  BALLAST_RETURN_IF_ERROR(OpenCluster(options, addresses).status());
  BALLAST_RETURN_IF_ERROR(Tls::Open(options.access).status());
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<Access> access, OpenAccess(options));
  return is_new ? access->CheckThatTokensAreThere() : absl::OkStatus();
}

absl::Status Server::CheckNewAddresses(const ServerOptions& options,
                                       const std::vector<Address>& others, NamedMemory& memory) {
  BALLAST_ASSIGN_OR_RETURN(std::vector<Address> addresses, ParseAddresses(options));
  addresses.insert(addresses.end(), others.begin(), others.end());
  return ListeningSockets::CheckNew(addresses, memory);
}

std::string Server::AccessLine() const { return impl_->access->ToLine(); }

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() { Shutdown(0); }

const std::vector<std::string>& Server::addresses() const { return impl_->addresses; }

std::shared_ptr<grpc::Channel> Server::InProcessChannel() {
  return impl_->grpc_server->InProcessChannel(grpc::ChannelArguments());
}

void Server::SetServing(bool serving) {
  impl_->serving = serving;
  if (auto* health = impl_->grpc_server->GetHealthCheckService()) health->SetServingStatus(serving);
}

bool Server::serving() const { return impl_->serving; }

const Access& Server::access() const { return *impl_->access; }

CallPools& Server::pools() const { return impl_->pools; }

std::string Server::ClusterLine() const {
  return impl_->registration == nullptr ? std::string() : impl_->registration->ToLine();
}

void Server::LeaveCluster(bool keeps_jobs) {
  if (impl_->registration != nullptr) impl_->registration->End(keeps_jobs);
}

int64_t Server::certificate_expires_unix_seconds() const {
  return impl_->tls->expires_unix_seconds();
}

std::vector<CallUse> Server::calls() const {
  const auto use = [](const char* kind, const CallPool& pool) {
    return CallUse{.kind = kind, .in_progress = pool.calls(), .most = pool.most_calls()};
  };
  const CallPools& pools = impl_->pools;
  return {use("control", pools.control), use("creation", pools.creation),
          use("traces", pools.traces), use("readers", pools.readers),
          use("streams", pools.streams)};
}

void Server::LeaveAddresses() { impl_->listener->sockets().LeaveFiles(); }

void Server::Shutdown(double grace_seconds) {
  // Once: the destructor comes here again.
  std::call_once(impl_->shut_down, [&] {
    // What uses the server ends before it: no file is read again, and no connection comes.
    impl_->access_files.reset();
    impl_->listener.reset();
    impl_->engine.UseDialer(nullptr);
    impl_->member_links->Stop();
    impl_->seal_reminders.reset();  // No reminders to streams that are being cancelled.
    impl_->grpc_server->Shutdown(proto::Deadline(absl::Seconds(grace_seconds)));
    impl_->grpc_server->Wait();  // For every call; those that are queued in a pool still run.
    impl_->shared_memory_server.reset();  // No call asks for offers any more.
  });
}

}  // namespace ballast::server
