// The other end of the wires, in a process of its own as in the product.
#ifndef BALLAST_TESTS_BENCH_WIRE_WIRE_PEER_H_
#define BALLAST_TESTS_BENCH_WIRE_WIRE_PEER_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace ballast::bench {

// Ends with the object. Constant once it is started.
class WirePeer {
 public:
  struct Addresses {
    std::string raw_tcp, raw_unix, grpc_tcp, grpc_unix;
  };

  // Forks, and so must be called before there are other threads.
  static absl::StatusOr<std::unique_ptr<WirePeer>> Start();
  ~WirePeer();
  pid_t pid() const { return pid_; }
  const Addresses& addresses() const { return addresses_; }

 private:
  explicit WirePeer(std::string folder) : folder_(std::move(folder)) {}
  absl::Status ReadAddresses(int fd);

  const std::string folder_;
  pid_t pid_ = -1;
  Addresses addresses_;
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_WIRE_WIRE_PEER_H_
