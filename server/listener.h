// Accepts connections and hands them on.
//
// Once gRPC's own listener has run out of file descriptors, it never accepts again. This one
// reserves some. It refuses a connection that would take one of the last. A connection without a
// descriptor waits until there are more.
#ifndef BALLAST_SERVER_LISTENER_H_
#define BALLAST_SERVER_LISTENER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/rare_warning.h"
#include "server/listening_sockets.h"

namespace ballast::server {

// Raises this process's soft limit of file descriptors to the hard limit, because each connection
// needs one. Returns the limit.
int64_t RaiseDescriptorLimit();

// Not thread-safe.
class Listener {
 public:
  Listener() = default;
  ~Listener();  // The sockets end with it.

  // Gives the connections of `sockets` to `take`, which then owns them, on its own thread, until
  // destroyed. Now and then `warn` gets a line about connections without descriptors.
  absl::Status Start(ListeningSockets sockets, std::function<void(int connection)> take,
                     std::function<void(const std::string&)> warn);
  ListeningSockets& sockets() { return sockets_; }

 private:
  void Run();
  void AcceptAll(int socket);
  void NoRoom();

  ListeningSockets sockets_;
  std::function<void(int)> take_;
  std::optional<RareWarning> warning_;
  FileDescriptor stop_;  // Written to at the end.
  int64_t most_descriptors_ = 0;
  std::thread thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_LISTENER_H_
