// Free memory of the machine, and of the process's control groups and limits. A process that takes
// more is killed, not refused.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <string>

namespace ballast {

// The system's files.
struct MemoryFiles {
  std::string meminfo = "/proc/meminfo";
  std::string groups_of_process = "/proc/self/cgroup";
  std::string groups = "/sys/fs/cgroup";  // Where control groups are mounted.
};

// The memory that this process can still take. It is the minimum of MemAvailable, of the rest under
// the memory limits of the process's control group and all above it (cgroup v2 and v1), and of the
// rest of its address space (ulimit -v). Pages that only cache files count as free. Unreadable
// limits are ignored.
int64_t AvailableMemoryBytes(const MemoryFiles& files = {});

int64_t PhysicalMemoryBytes();

// A service's memory without a limit of its own: 80% of the free memory at its start, or of
// `most_bytes` if that is less.
int64_t DefaultMemoryLimitBytes(const MemoryFiles& files = {},
                                int64_t most_bytes = PhysicalMemoryBytes());

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_
