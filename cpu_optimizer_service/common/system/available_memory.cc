#include "cpu_optimizer_service/common/system/available_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

#include "absl/strings/numbers.h"

namespace ballast {
namespace {

// The number after `name`, or the file's first word if `name` is empty.
std::optional<int64_t> ReadNumber(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (!name.empty()) {
      if (word != name) continue;
      file >> word;
    }
    int64_t number = 0;
    if (!absl::SimpleAtoi(word, &number)) return std::nullopt;  // "max": no limit.
    return number;
  }
  return std::nullopt;
}

}  // namespace

int64_t AvailableMemoryBytes(const std::string& meminfo_path, const std::string& cgroup_folder) {
  int64_t available_bytes = std::numeric_limits<int64_t>::max();
  if (const auto kibibytes = ReadNumber(meminfo_path, "MemAvailable:"); kibibytes.has_value()) {
    available_bytes = *kibibytes * 1024;
  }
  const auto limit = ReadNumber(cgroup_folder + "/memory.max", "");
  const auto used = ReadNumber(cgroup_folder + "/memory.current", "");
  if (limit.has_value() && used.has_value()) {
    const int64_t cached = ReadNumber(cgroup_folder + "/memory.stat", "inactive_file").value_or(0);
    available_bytes = std::min(available_bytes, std::max<int64_t>(0, *limit - *used + cached));
  }
  return available_bytes;
}

int64_t PhysicalMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

int64_t DefaultMemoryLimitBytes(int64_t physical_bytes, const std::string& cgroup_folder) {
  int64_t usable_bytes = physical_bytes;
  const auto limit = ReadNumber(cgroup_folder + "/memory.max", "");
  if (limit.has_value() && *limit > 0) usable_bytes = std::min(usable_bytes, *limit);
  return static_cast<int64_t>(0.8 * static_cast<double>(usable_bytes));
}

}  // namespace ballast
