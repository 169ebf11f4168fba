// How fast this host can update, and how fast it could at most: the update's kernel against the
// memory traffic that it cannot avoid, measured in turns.
//
//   absl::StatusOr<SelfBenchmark> speed = RunSelfBenchmark({.threads = 0});
//   if (speed.ok()) std::cout << ToTable(*speed);
//
// Uses all of the threads and memory bandwidth that it is given while it runs.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_SELF_BENCHMARK_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_SELF_BENCHMARK_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/host/topology.h"

namespace ballast {

struct SelfBenchmarkOptions {
  int threads = 0;                                // As of TaskPool.
  int64_t memory_bytes = int64_t{2} << 30;        // At most; the more, the less caches count.
  double seconds = 5;                             // About, all in all; one round is always run.
  const Topology* topology = &MachineTopology();  // Another one for tests.
};
// What fits into the start of a service: at most a third of a second on most hosts, and at most
// 256 MiB and an eighth of `memory_limit_bytes`.
SelfBenchmarkOptions BriefSelfBenchmark(int threads, int64_t memory_limit_bytes);

struct KernelSpeed {
  int threads = 0;
  // Medians over the rounds.
  double roofline_elements_per_second = 0;
  double kernel_elements_per_second = 0;
  double fraction = 0;  // Of the roofline, in the same round.
};

// What may make a host slower than it could be.
struct HostFacts {
  int threads = 0;
  int processors = 0;  // That this process may use.
  int nodes = 0;
  bool bound = true;                      // Each thread to its node; of no account with one node.
  std::optional<double> huge_page_share;  // 0 to 1; unknown where the system does not say.
  std::optional<double> kernel_fraction;  // Of the roofline, with all threads.
};
// One line each.
std::vector<std::string> HostWarnings(const HostFacts& facts);

struct SelfBenchmark {
  HostFacts facts;
  std::string kernel_target;  // The instruction set.
  int64_t elements = 0;
  int rounds = 0;
  KernelSpeed all_threads;
  KernelSpeed one_thread;
};

// RESOURCE_EXHAUSTED if there is no memory; INVALID_ARGUMENT if memory_bytes is too little for one
// chunk.
absl::StatusOr<SelfBenchmark> RunSelfBenchmark(const SelfBenchmarkOptions& options);

// For a log.
std::string ToLine(const SelfBenchmark& result);
// A few lines, with the warnings.
std::string ToTable(const SelfBenchmark& result);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_SELF_BENCHMARK_H_
