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
  // Who may do what, and TLS. Empty: every caller may do everything.
  AccessOptions access;
  // Addresses that other hosts can reach are refused, where not every caller has to say who
  // they are, over TLS, unless this is set.
  bool insecure = false;
  // Once a step's first seal is this old, sealed ranks are notified which ranks they wait for,
  // every `seal_reminder_seconds`.
  double seal_deadline_seconds = 60;
  double seal_reminder_seconds = 5;
  // Workers on the same host are offered memory in common with the service
  // (shared_memory_server.h). If the system has none to give, a line in the log reports it, and
  // everything is sent in messages.
  bool shared_memory = true;
  // Every caller may name paths of its host to save to and load from
  // (checkpoint_paths.h).
  bool allow_paths = false;
  // Served too, and outlive the server.
  std::vector<grpc::Service*> more_services;
};

class Access;
struct CallPools;

// How many calls of a kind are in progress, and how many there may be.
struct CallUse {
  std::string kind;  // control, creation, traces, readers or streams (call_pool.h).
  size_t in_progress = 0;
  size_t most = 0;
};

class Server {
 public:
  // INVALID_ARGUMENT: as Check.
  // UNAVAILABLE: an address that cannot be listened on, such as a taken port. One line each.
  static absl::StatusOr<std::unique_ptr<Server>> Start(Engine& engine,
                                                       const ServerOptions& options);
  ~Server();

  // INVALID_ARGUMENT, in one line: an address that is malformed, or not loopback and `insecure` is
  // not set; files of access that are missing or wrong; and, if `is_new`, a role of a token that
  // there is none of. From a service that has jobs an operator may have taken it.
  static absl::Status Check(const ServerOptions& options, bool is_new);

  // UNAVAILABLE: one of these, or of `others`, where the process listens, too, cannot be listened on
  // while a process runs that left the rest in `memory`.
  static absl::Status CheckNewAddresses(const ServerOptions& options,
                                        const std::vector<Address>& others, NamedMemory& memory);

  // The addresses of options.listen, with the ports that the system chose.
  const std::vector<std::string>& addresses() const;

  // Who may do what here, in one line for the log.
  std::string AccessLine() const;

  // A channel without a socket to this server. It ends with the server. With roles its calls are an unknown caller's, and are refused.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  // What the health service reports from now on; calls are answered either way.
  void SetServing(bool serving);
  bool serving() const;
  const Access& access() const;
  // When the certificate of its TLS expires; 0: it speaks none.
  int64_t certificate_expires_unix_seconds() const;
  std::vector<CallUse> calls() const;
  CallPools& pools() const;
  // Before a Shutdown after which the next process goes on with the addresses: connections that come
  // meanwhile wait for it.
  void LeaveAddresses();
  // Refuses new calls at once, cancels those that still run after `grace_seconds`, and waits for
  // their end.
  void Shutdown(double grace_seconds);

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_SERVER_H_
