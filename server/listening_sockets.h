// Listening sockets, which one process may inherit from another.
#ifndef BALLAST_SERVER_LISTENING_SOCKETS_H_
#define BALLAST_SERVER_LISTENING_SOCKETS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "server/address.h"

namespace ballast::server {

// Not thread-safe.
class ListeningSockets {
 public:
  ListeningSockets() = default;
  ListeningSockets(ListeningSockets&&) = default;
  ListeningSockets& operator=(ListeningSockets&&) = default;
  ~ListeningSockets();  // Removes the files of unix sockets.

  // Connections queue from now on. Returns the address; if its port is 0, with the port that the
  // system chose. UNAVAILABLE, in one line: the address is taken, is not this host's, or not
  // allowed for this user; or no descriptors are left. With `memory`, nullable, its keeper has the
  // sockets, too. Sockets of an earlier process at this address are used again, with their queued
  // connections. If a name has several addresses, one working address is enough. `warn`, which may
  // be null, then gets a line for each of the others.
  absl::StatusOr<std::string> Add(const Address& address, NamedMemory* memory = nullptr,
                                  const std::function<void(const std::string&)>& warn = nullptr);
  // Whether an earlier process left the address's sockets there.
  static bool IsKept(const Address& address, const NamedMemory* memory);

  // Gives up an earlier process's sockets at addresses that are not in `addresses`. Until this
  // object ends, or ForgetKept, Add may take the ports that those sockets still have.
  void GiveUpKept(const std::vector<Address>& addresses, NamedMemory& memory);
  // The keeper forgets them, too. Their queued connections end.
  void ForgetKept(NamedMemory& memory);

  // For a next process that uses the keeper's sockets: unix sockets' files stay when this ends.
  void LeaveFiles() { unix_paths_.clear(); }

  // UNAVAILABLE: one of these cannot be opened while a process runs that left the others in
  // `memory`.
  static absl::Status CheckNew(const std::vector<Address>& addresses, NamedMemory& memory);

  const std::vector<FileDescriptor>& all() const { return sockets_; }

 private:
  absl::StatusOr<std::string> AddKept(const Address& address, NamedMemory& memory);
  absl::Status KeepFrom(size_t first, const Address& address, NamedMemory* memory);
  absl::StatusOr<FileDescriptor> Bind(const Address& address, int family, const void* name,
                                      size_t name_bytes) const;

  std::vector<FileDescriptor> sockets_;
  std::vector<std::string> unix_paths_;
  std::map<std::string, FileDescriptor> given_up_;  // By KeptName.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_LISTENING_SOCKETS_H_
