// How much memory the machine and the process's control group give. A process that takes more is
// killed, not refused.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <string>

namespace ballast {

// What this process can still take: the smaller of what the kernel calls available (MemAvailable)
// and what is left under the control group's limit (cgroup v2), where pages that only cache files
// count as left. What cannot be read limits nothing.
int64_t AvailableMemoryBytes(const std::string& meminfo_path = "/proc/meminfo",
                             const std::string& cgroup_folder = "/sys/fs/cgroup");

int64_t PhysicalMemoryBytes();

// What a service may use if it is given no limit: 80% of the smaller of physical memory and the
// control group's limit.
int64_t DefaultMemoryLimitBytes(int64_t physical_bytes = PhysicalMemoryBytes(),
                                const std::string& cgroup_folder = "/sys/fs/cgroup");

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_AVAILABLE_MEMORY_H_
