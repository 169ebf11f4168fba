// Accepts connections and hands them on.
//
// gRPC's own listener accepts until it runs out of file descriptors once, and then never again.
// This one keeps some: a connection that would take one of the last is refused at once, and the
// next one that comes when there are more is accepted.
#ifndef BALLAST_SERVER_LISTENER_H_
#define BALLAST_SERVER_LISTENER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "server/address.h"

namespace ballast::server {

// Raises this process's soft limit of file descriptors as far as it may go: a service needs one for
// each connection. Returns the limit.
int64_t RaiseDescriptorLimit();

// Ends the connections of this process from `peer`, as gRPC names it: "ipv4:127.0.0.1:50051",
// "ipv6:%5B::1%5D:50051", with what they have sent and nobody has read. Whoever has one notices
// that it has ended. Returns how many there were.
int CloseConnectionsOf(const std::string& peer);

// Not thread-safe.
class Listener {
 public:
  Listener() = default;
  // Stops accepting, and removes the files of unix sockets.
  ~Listener();

  // Connections queue from now on. Returns the address, with the port that the system chose where
  // that is 0. UNAVAILABLE: it is taken, or not an address of this host; one line.
  // With `memory`, nullable, its keeper has the sockets, too, and what an earlier process left of
  // this address is listened on again: its connections have queued meanwhile.
  absl::StatusOr<std::string> Add(const Address& address, NamedMemory* memory = nullptr);
  // Whether an earlier process left the address's sockets there.
  static bool IsKept(const Address& address, const NamedMemory* memory);

  // Of an earlier process: what is listened on no more. Connections that have queued end.
  static void ForgetKept(NamedMemory& memory);

  // Gives accepted connections to `take`, which owns them then, on a thread of its own, until
  // destroyed. `warn` is told, now and then, in one line, of connections that were refused.
  absl::Status Start(std::function<void(int connection)> take,
                     std::function<void(const std::string&)> warn);

 private:
  absl::StatusOr<std::string> AddKept(const Address& address, NamedMemory& memory);
  absl::Status KeepFrom(size_t first, const Address& address, NamedMemory* memory);
  absl::StatusOr<FileDescriptor> Bind(int family, const void* name, size_t name_bytes) const;
  void Run();
  void AcceptAll(int socket);
  // There is no descriptor for a connection that waits: takes and closes it with the spare one.
  void RefuseOne(int socket);
  void Warn();

  std::vector<FileDescriptor> sockets_;
  std::vector<std::string> unix_paths_;
  std::function<void(int)> take_;
  std::function<void(const std::string&)> warn_;
  FileDescriptor stop_;   // Written to when it is time.
  FileDescriptor spare_;  // Given up for a moment to refuse a connection.
  int64_t most_descriptors_ = 0;
  int64_t refused_ = 0;  // Since the last warning.
  std::chrono::steady_clock::time_point warned_;
  std::thread thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_LISTENER_H_
