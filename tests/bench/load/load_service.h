// The service that a load is put on: one that runs already, one in this process, or a ballastd of
// our own, which ends with the object.
#ifndef BALLAST_TESTS_BENCH_LOAD_LOAD_SERVICE_H_
#define BALLAST_TESTS_BENCH_LOAD_LOAD_SERVICE_H_

#include <grpcpp/channel.h>
#include <sys/types.h>

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "tests/bench/load/load_options.h"

namespace ballast::bench {

// Constant once it is started.
class LoadService {
 public:
  // UNAVAILABLE, with what it said last, if it does not start. A process of our own is started from
  // the folder of this program, and must so be started before there are other threads.
  static absl::StatusOr<std::unique_ptr<LoadService>> Start(const LoadOptions& options);
  virtual ~LoadService() = default;

  // A connection of its own for each rank, as processes have.
  virtual absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel() = 0;
  // The service's process, where it is known and not this one.
  virtual std::optional<pid_t> pid() const { return std::nullopt; }
  virtual std::optional<int> tcp_port() const { return std::nullopt; }
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LOAD_LOAD_SERVICE_H_
