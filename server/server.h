// The service on the network: gRPC around an engine.
//
//   Engine engine({.memory_limit_bytes = 20LL << 30});
//   auto server = Server::Start(engine, {.listen = {"127.0.0.1:0"}}).value();
//   ... server->addresses() ...
//   server->Shutdown(/*grace_seconds=*/1);
//
// The engine outlives the server. Thread-safe. The destructor shuts down without grace.
#ifndef BALLAST_SERVER_SERVER_H_
#define BALLAST_SERVER_SERVER_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/engine.h"
#include "proto/cluster/etcd.h"
#include "server/access/access_options.h"
#include "server/address.h"

namespace grpc {
class Channel;
class Service;
}  // namespace grpc

namespace ballast::server {

struct ServerOptions {
  // "HOST:PORT" (port 0: the system chooses) or "unix:/path". If empty, the server is reachable
  // through InProcessChannel only.
  std::vector<std::string> listen = {"127.0.0.1:7070"};
  // "HOST:PORT" at which other services reach this one. Empty: AdvertisedOf the above.
  std::string advertise;
  // Who may do what, and TLS. Empty: every caller may do everything.
  AccessOptions access;
  // Allow addresses that other hosts can reach without TLS and authentication of every caller.
  bool insecure = false;
  // Once a step's first seal is this old, sealed ranks are told which ranks they wait for, every
  // `seal_reminder_seconds`.
  double seal_deadline_seconds = 60;
  double seal_reminder_seconds = 5;
  // Offer workers on the same host shared memory (shared_memory_server.h). If the system has none
  // left, the log says so, and everything is sent in messages.
  bool shared_memory = true;
  // Every caller may save to and load from paths of its host (checkpoint_paths.h).
  bool allow_paths = false;
  // The cluster that the service belongs to, by its address in etcd (proto/cluster/cluster.h), and
  // how etcd lets it in. Empty: none.
  std::string cluster;
  cluster::Etcd::Access etcd;
  // Additional services; they outlive the server.
  std::vector<grpc::Service*> more_services;
};

class Access;
struct CallPools;

// The number of calls of a kind in progress, and its bound.
struct CallUse {
  std::string kind;  // control, creation, traces, readers or streams (call_pool.h).
  size_t in_progress = 0;
  size_t most = 0;
};

class Server {
 public:
  // INVALID_ARGUMENT: as in Check. UNAVAILABLE: an address cannot be used, for example a taken
  // port. One line each.
  static absl::StatusOr<std::unique_ptr<Server>> Start(Engine& engine,
                                                       const ServerOptions& options);
  ~Server();

  // INVALID_ARGUMENT, in one line: an address is malformed, or not loopback without `insecure`; an
  // access file is missing or wrong. If `is_new`, also: the roles file names a token that the
  // tokens file does not define. In a service with jobs an operator may have revoked that token.
  static absl::Status Check(const ServerOptions& options, bool is_new);

  // UNAVAILABLE: one of these cannot be opened while a process runs that left the rest in `memory`.
  // `others` are further addresses of the process.
  static absl::Status CheckNewAddresses(const ServerOptions& options,
                                        const std::vector<Address>& others, NamedMemory& memory);

  // The addresses of options.listen, with the ports that the system chose.
  const std::vector<std::string>& addresses() const;

  // The access rules, in one line for the log.
  std::string AccessLine() const;

  // A channel without a socket to this server. It ends with the server. With roles its calls come
  // from an unknown caller, and are refused.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  // The health service's status from now on; calls are answered either way.
  void SetServing(bool serving);
  bool serving() const;
  const Access& access() const;
  // When its TLS certificate expires; 0: no TLS.
  int64_t certificate_expires_unix_seconds() const;
  std::vector<CallUse> calls() const;
  // How it stands with the cluster, in a line; empty: there is none.
  std::string ClusterLine() const;
  // The service stops, and leaves the cluster. Without `keeps_jobs` its jobs end with it.
  void LeaveCluster(bool keeps_jobs);
  CallPools& pools() const;
  // Before a Shutdown after which the next process takes over the addresses: new connections wait
  // for it.
  void LeaveAddresses();
  // Refuses new calls at once, cancels running ones after `grace_seconds`, and waits for their end.
  void Shutdown(double grace_seconds);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_SERVER_H_
