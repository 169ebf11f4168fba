// How much more memory this process can use without being killed.
#ifndef BALLAST_CLIENT_SESSION_AVAILABLE_MEMORY_H_
#define BALLAST_CLIENT_SESSION_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <string>

namespace ballast::client {

// The smaller of what the kernel reports as available (MemAvailable) and what is left under the
// control group's limit (cgroup v2), where pages that only cache files count as left. A file that
// cannot be read sets no limit.
int64_t AvailableMemoryBytes(const std::string& meminfo_path = "/proc/meminfo",
                             const std::string& cgroup_folder = "/sys/fs/cgroup");

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_AVAILABLE_MEMORY_H_
