// What a process has used, from the kernel.
#ifndef BALLAST_TESTS_BENCH_LOAD_PROCESS_USAGE_H_
#define BALLAST_TESTS_BENCH_LOAD_PROCESS_USAGE_H_

#include <sys/types.h>

#include <cstdint>

#include "absl/status/statusor.h"

namespace ballast::bench {

// CPU time of all its threads, ended ones included.
absl::StatusOr<double> CpuSeconds(pid_t pid);

struct ResidentMemory {
  int64_t total_bytes = 0;
  int64_t anonymous_bytes = 0;
  int64_t shared_bytes = 0;  // Memory files, counted in every process that maps them.
  int64_t peak_bytes = 0;    // Of the total.
};
absl::StatusOr<ResidentMemory> ResidentMemoryOf(pid_t pid);

struct SocketBytes {
  int64_t sent = 0;
  int64_t received = 0;
};
// Over this process's TCP connections to `port`, as the kernel counted them.
SocketBytes TcpBytes(int port);

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LOAD_PROCESS_USAGE_H_
