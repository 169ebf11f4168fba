// How much memory the machine, and the control groups and limits of the process, give. A process
// that takes more is killed, not refused.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <string>

namespace ballast {

// Where the system tells it.
struct MemoryFiles {
  std::string meminfo = "/proc/meminfo";
  std::string groups_of_process = "/proc/self/cgroup";
  std::string groups = "/sys/fs/cgroup";  // Where control groups are mounted.
};

// What this process can still take: the smallest of what the kernel calls available (MemAvailable)
// and of what is left under the limits of the process's own control group and of each that it lies
// in (cgroup v2 and v1), where pages that only cache files count as left, and of its address space
// (ulimit -v). What cannot be read limits nothing.
int64_t AvailableMemoryBytes(const MemoryFiles& files = {});

int64_t PhysicalMemoryBytes();

// What a service may use if it is given no limit: 80% of what there is to take as it starts, or of
// `most_bytes` if that is less.
int64_t DefaultMemoryLimitBytes(const MemoryFiles& files = {},
                                int64_t most_bytes = PhysicalMemoryBytes());

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_
