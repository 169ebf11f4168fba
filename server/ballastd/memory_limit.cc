#include "server/ballastd/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/numbers.h"

namespace ballast::server {

int64_t PhysicalMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

int64_t DefaultMemoryLimitBytes(int64_t physical_bytes, const std::string& cgroup_limit_path) {
  int64_t available_bytes = physical_bytes;
  std::string text;  // "max" where there is no limit.
  std::ifstream(cgroup_limit_path) >> text;
  int64_t limit_bytes = 0;
  if (absl::SimpleAtoi(text, &limit_bytes) && limit_bytes > 0) {
    available_bytes = std::min(available_bytes, limit_bytes);
  }
  return static_cast<int64_t>(0.8 * static_cast<double>(available_bytes));
}

}  // namespace ballast::server
