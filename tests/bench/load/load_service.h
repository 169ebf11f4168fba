// What a load is put on: services that run already, one in this process, or processes of our own,
// which end with the object.
#ifndef BALLAST_TESTS_BENCH_LOAD_LOAD_SERVICE_H_
#define BALLAST_TESTS_BENCH_LOAD_LOAD_SERVICE_H_

#include <grpcpp/channel.h>
#include <sys/types.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "tests/bench/load/load_options.h"

namespace ballast::bench {

// Constant once it is started.
class LoadService {
 public:
  // UNAVAILABLE, with what it said last, if it does not start. A process of our own is started from
  // the folder of this program, and must so be started before there are other threads.
  static absl::StatusOr<std::unique_ptr<LoadService>> Start(const LoadOptions& options);
  virtual ~LoadService() = default;

  // A connection of its own for each rank, as processes have, to its home. Writes the job's members
  // and homes, where there are several services.
  virtual absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel(int rank, JobSpec& job) = 0;
  // The services' processes, where they are known and not this one.
  virtual std::vector<pid_t> pids() const { return {}; }
  virtual std::vector<int> tcp_ports() const { return {}; }
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LOAD_LOAD_SERVICE_H_
