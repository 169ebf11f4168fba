// Puts a load on a service and measures both.
#ifndef BALLAST_TESTS_BENCH_LOAD_LOAD_RUN_H_
#define BALLAST_TESTS_BENCH_LOAD_LOAD_RUN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/v1/jobs.pb.h"
#include "tests/bench/load/load_options.h"
#include "tests/bench/load/load_rank.h"
#include "tests/bench/load/process_usage.h"

namespace ballast::bench {

// At one instant. What cannot be known is absent: of a service that is not a child of this process,
// or that is this process.
struct Usage {
  SteadyTime time;
  double worker_cpu_seconds = 0;
  std::optional<double> service_cpu_seconds;  // Of all services together, as below.
  std::optional<SocketBytes> sockets;         // This process's, to them, over TCP.
  ResidentMemory worker_memory;
  std::optional<ResidentMemory> service_memory;
};

struct LoadResult {
  // By job and rank, of the measured steps.
  std::vector<std::vector<std::vector<RankStep>>> steps;
  Usage idle;   // Before the service had a job.
  Usage begun;  // Between warm-up and measured steps.
  Usage ended;  // After them.
  // As each service describes them at the end, without parameters.
  std::vector<v1::Job> jobs;
  std::vector<double> round_trip_seconds;  // Of a small call, while nothing trains.
  int64_t payload_bytes_up = 0;            // Of one step of all jobs.
  int64_t payload_bytes_down = 0;
  bool shared_memory = false;
  std::string weights_sha256;  // Of all ranks' weights after the last step.
};

// An error of any rank ends the run, INTERNAL also where a rank's weights are not the service's.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options);

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LOAD_LOAD_RUN_H_
