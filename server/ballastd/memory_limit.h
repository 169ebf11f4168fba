// How much memory jobs may have when nobody has said.
#ifndef BALLAST_SERVER_BALLASTD_MEMORY_LIMIT_H_
#define BALLAST_SERVER_BALLASTD_MEMORY_LIMIT_H_

#include <cstdint>
#include <string>

namespace ballast::server {

int64_t PhysicalMemoryBytes();

// 80% of the smaller of physical memory and the control group's limit: a container that asks for
// more is killed, not refused. `cgroup_limit_path` (cgroup v2) counts if it holds a number.
int64_t DefaultMemoryLimitBytes(int64_t physical_bytes = PhysicalMemoryBytes(),
                                const std::string& cgroup_limit_path = "/sys/fs/cgroup/memory.max");

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_MEMORY_LIMIT_H_
