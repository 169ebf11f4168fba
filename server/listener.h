// Accepts connections and hands them on.
//
// gRPC's own listener accepts until it runs out of file descriptors once, and then never again.
// This one keeps some: a connection that would take one of the last is refused at once, and the
// next one that comes when there are more is accepted. Which are handed on, and when: newcomers.h.
#ifndef BALLAST_SERVER_LISTENER_H_
#define BALLAST_SERVER_LISTENER_H_

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/rare_warning.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "server/address.h"
#include "server/newcomers.h"

namespace ballast::server {

// Raises this process's soft limit of file descriptors as far as it may go: a service needs one for
// each connection. Returns the limit.
int64_t RaiseDescriptorLimit();

// Ends the connections of this process from `peer`, as gRPC names it: "ipv4:127.0.0.1:50051",
// "ipv6:%5B::1%5D:50051", with what they have sent and nothing has read. The owner of one notices
// that it has ended. Returns how many there were.
int CloseConnectionsOf(const std::string& peer);

// As gRPC names the other end of a TCP connection at that address; that of a link has the link's
// number behind it, "ipv6:%5Bfe80::1%254%5D:50051". Empty: it is none of TCP.
std::string PeerAt(const sockaddr_storage& name);

// Whom the connection of `peer` counts for: the host, "ipv4:127.0.0.1", of IPv6 its network,
// "ipv6:2001:db8::", whatever its link. Empty: it has no name of its own.
std::string SourceOf(const std::string& peer);

struct ListenerOptions {
  bool tls = false;  // Connections of TCP speak TLS.
  // See Newcomers; by SourceOf, of users "user:1000". Null: no source is held.
  Newcomers::HeldUntil held_until;
  // Beyond so many connections whose client has not said enough yet, the oldest is closed.
  size_t most_newcomers = std::numeric_limits<size_t>::max();
};

// Not thread-safe.
class Listener {
 public:
  Listener() = default;
  // Stops accepting, and removes the files of unix sockets.
  ~Listener();

  // Connections queue from now on. Returns the address, with the port that the system chose where
  // that is 0. UNAVAILABLE, in one line: it is taken, not an address of this host,
  // or not this user's to listen on; no descriptors are left.
  // With `memory`, nullable, its keeper has the sockets, too, and what an earlier process left of
  // this address is listened on again: its connections have queued meanwhile.
  // Of a name with several addresses one that can be listened on is enough. `warn`, which may be
  // null, then gets a line for each of the others.
  absl::StatusOr<std::string> Add(const Address& address, NamedMemory* memory = nullptr,
                                  const std::function<void(const std::string&)>& warn = nullptr);
  // Whether an earlier process left the address's sockets there.
  static bool IsKept(const Address& address, const NamedMemory* memory);

  // Of an earlier process: what is listened on no more, as `addresses` does not name it. Until this
  // listener ends, or ForgetKept, Add may take ports that those sockets still have.
  void GiveUpKept(const std::vector<Address>& addresses, NamedMemory& memory);
  // The keeper, too, has those no more. Connections that have queued end.
  void ForgetKept(NamedMemory& memory);

  // Gives accepted connections to `take`, which owns them then, on a thread of its own, until
  // destroyed. `warn` gets a line, now and then, about connections that were refused.
  absl::Status Start(std::function<void(int connection)> take,
                     std::function<void(const std::string&)> warn, ListenerOptions options = {});

  // Where the next process goes on with the sockets that the keeper has: the files of unix sockets
  // stay when this listener ends.
  void LeaveFiles() { unix_paths_.clear(); }

  // UNAVAILABLE: one of these cannot be listened on while a process runs that left the others in
  // `memory`.
  static absl::Status CheckNew(const std::vector<Address>& addresses, NamedMemory& memory);

 private:
  absl::StatusOr<std::string> AddKept(const Address& address, NamedMemory& memory);
  absl::Status KeepFrom(size_t first, const Address& address, NamedMemory* memory);
  absl::StatusOr<FileDescriptor> Bind(const Address& address, int family, const void* name,
                                      size_t name_bytes) const;
  void Run(Newcomers& newcomers);
  void AcceptAll(int socket, Newcomers& newcomers);
  void HandOn(Newcomers& newcomers);
  // There is no descriptor for a connection that waits: takes and closes it with the spare one.
  void RefuseOne(int socket);
  void Refused();

  std::vector<FileDescriptor> sockets_;
  std::vector<std::string> unix_paths_;
  std::map<std::string, FileDescriptor> given_up_;  // By KeptName.
  std::function<void(int)> take_;
  std::optional<RareWarning> refusals_;
  bool tls_ = false;
  size_t most_newcomers_ = 0;
  FileDescriptor events_;  // Of all sockets, newcomers and:
  FileDescriptor stop_;    // Written to when it is time.
  FileDescriptor spare_;   // Given up for a moment to refuse a connection.
  int64_t most_descriptors_ = 0;
  std::thread thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_LISTENER_H_
