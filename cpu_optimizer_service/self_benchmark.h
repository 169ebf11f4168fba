// How fast this host updates, and how fast it could at most: the update's kernel and a loop with
// the same memory traffic, measured in turns.
//
//   absl::StatusOr<SelfBenchmark> speed = RunSelfBenchmark({.threads = 0});
//   if (speed.ok()) std::cout << ToTable(*speed);
//
// While it runs, it uses all of its threads and memory bandwidth.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_SELF_BENCHMARK_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_SELF_BENCHMARK_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/plane.h"
#include "cpu_optimizer_service/host/topology.h"

namespace ballast {

struct BenchmarkedUpdate {
  HyperParameters values;  // With at most three planes.
  StateFormat format = StateFormat::kFloat32;
};

struct SelfBenchmarkOptions {
  int threads = 0;                                // As in TaskPool.
  int64_t memory_bytes = int64_t{2} << 30;        // Maximum; the more, the less caches matter.
  double seconds = 5;                             // The approximate total; at least one round runs.
  std::vector<BenchmarkedUpdate> updates = {{}};  // At least one.
  const Topology* topology = &MachineTopology();  // Another one for tests.
};
// Short enough for the start of a service: at most a third of a second on most hosts, and at most
// 256 MiB and an eighth of `memory_limit_bytes`.
SelfBenchmarkOptions BriefSelfBenchmark(int threads, int64_t memory_limit_bytes);

struct KernelSpeed {
  std::string optimizer;         // And its format, if that is not fp32.
  double bytes_per_element = 0;  // Of traffic, with gradients and shards in bf16.
  int threads = 0;
  // Medians over the rounds.
  double roofline_elements_per_second = 0;
  double kernel_elements_per_second = 0;
  double fraction = 0;  // Of the roofline, in the same round.
};

// Properties that may make a host slow.
struct HostFacts {
  int threads = 0;
  int processors = 0;  // Usable by this process.
  int nodes = 0;
  bool bound = true;                      // Each thread to its node; meaningless with one node.
  std::optional<double> huge_page_share;  // 0 to 1; empty if the system does not say.
  std::optional<double> kernel_fraction;  // Of the roofline: the first update's, with all threads.
};
// One line each.
std::vector<std::string> HostWarnings(const HostFacts& facts);

struct SelfBenchmark {
  HostFacts facts;
  std::string kernel_target;  // The instruction set.
  int64_t elements = 0;
  int rounds = 0;
  std::vector<KernelSpeed> all_threads;  // By update.
  std::vector<KernelSpeed> one_thread;
};

// RESOURCE_EXHAUSTED if memory is short; INVALID_ARGUMENT if memory_bytes is too little for one
// chunk.
absl::StatusOr<SelfBenchmark> RunSelfBenchmark(const SelfBenchmarkOptions& options);

// For a log.
std::string ToLine(const SelfBenchmark& result);
// A few lines, with the warnings.
std::string ToTable(const SelfBenchmark& result);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_SELF_BENCHMARK_H_
