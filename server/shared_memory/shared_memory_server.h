// Workers on the same host fetch the memory that they share with the service here, over an abstract
// unix socket, which one thread serves.
//
// AttachWorker requests an offer for the rank that it has just given to a process. A process that
// connects and shows the offer's token, once and in time, gets the file descriptor of that rank's
// memory. Then the connection stays open. When it ends, because the session or its process has
// ended, the rank's memory is dropped. The protocol is in proto/shared_memory_protocol.h.
//
// A rank has one memory at a time. A new claim ends the connection of the rank's last holder, and
// waits until that memory and its pages are released. If a process keeps its mapping after its
// connection has ended, it can fault pages in again; these are not counted.
//
// Thread-safe. Connections, tokens and the time of silent peers are bounded.
#ifndef BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SERVER_H_
#define BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SERVER_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/v1/jobs.pb.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/job/job.h"

namespace ballast::server {

// Tests shorten them.
struct SharedMemoryServerLimits {
  std::chrono::milliseconds silence{5000};  // A peer's time to show its token.
  std::chrono::milliseconds offer{60000};   // A token's lifetime.
  size_t offers = 4096;
  size_t peers = 1024;  // Connections; further ones are closed at once.
};

class SharedMemoryServer {
 public:
  // Listens on a socket named after `instance_id`. UNAVAILABLE if the system refuses it. With named
  // memory, that is shared; it outlives the server.
  static absl::StatusOr<std::unique_ptr<SharedMemoryServer>> Open(
      const std::string& instance_id, const SharedMemoryServerLimits& limits = {},
      NamedMemory* named_memory = nullptr);
  // Ends all connections. The memory stays as long as jobs use it.
  ~SharedMemoryServer();

  // An offer for this holder of a rank of `job`; nullopt if the rank has no memory to share. It
  // ends when it is used, with the rank's next offer, when there are too many, and with the job.
  std::optional<v1::SharedMemoryOffer> Offer(const std::shared_ptr<Job>& job, RankHolder holder);

 private:
  struct Impl;
  explicit SharedMemoryServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_SHARED_MEMORY_SHARED_MEMORY_SERVER_H_
