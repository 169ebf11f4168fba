#include "cpu_optimizer_service/common/system/available_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

#include "absl/strings/numbers.h"
#include "cpu_optimizer_service/common/limits/control_groups.h"

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

// What the two versions of control groups call the same things.
struct GroupFiles {
  const char* limit;
  const char* used;
  const char* cached;  // In memory.stat.
};
constexpr GroupFiles kVersion1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                  "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"/memory.max", "/memory.current", "inactive_file"};
// Version 1 says nearly 2^63 where there is no limit.
constexpr int64_t kNoLimitBytes = int64_t{1} << 60;

int64_t LeftInGroup(const std::string& folder, const GroupFiles& names) {
  const auto limit = ReadNumber(folder + names.limit, "");
  const auto used = ReadNumber(folder + names.used, "");
  if (!limit.has_value() || !used.has_value() || *limit <= 0 || *limit >= kNoLimitBytes) {
    return std::numeric_limits<int64_t>::max();
  }
  // The kernel takes back inactive pages of files before the limit refuses anything.
  const int64_t cached = ReadNumber(folder + "/memory.stat", names.cached).value_or(0);
  return std::max<int64_t>(0, *limit - *used + cached);
}

int64_t LeftInControlGroups(const MemoryFiles& files) {
  int64_t left_bytes = std::numeric_limits<int64_t>::max();
  VisitControlGroups(
      {.groups_of_process = files.groups_of_process, .groups = files.groups}, "memory",
      [&](const std::string& folder, ControlGroupVersion version) {
        left_bytes = std::min(
            left_bytes,
            LeftInGroup(folder, version == ControlGroupVersion::k1 ? kVersion1 : kVersion2));
      });
  return left_bytes;
}

int64_t LeftInAddressSpace() {
  rlimit limit = {};
  int64_t pages = 0;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      !(std::ifstream("/proc/self/statm") >> pages)) {
    return std::numeric_limits<int64_t>::max();
  }
  // The first number of statm is the size of the address space, which RLIMIT_AS bounds.
  return std::max<int64_t>(0, static_cast<int64_t>(limit.rlim_cur) - pages * sysconf(_SC_PAGESIZE));
}

}  // namespace

int64_t AvailableMemoryBytes(const MemoryFiles& files) {
  int64_t available_bytes = std::numeric_limits<int64_t>::max();
  if (const auto kibibytes = ReadNumber(files.meminfo, "MemAvailable:"); kibibytes.has_value()) {
    available_bytes = *kibibytes * 1024;
  }
  return std::min({available_bytes, LeftInControlGroups(files), LeftInAddressSpace()});
}

int64_t PhysicalMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

int64_t DefaultMemoryLimitBytes(const MemoryFiles& files, int64_t most_bytes) {
  return static_cast<int64_t>(
      0.8 * static_cast<double>(std::min(most_bytes, AvailableMemoryBytes(files))));
}

}  // namespace ballast
