#include "server/status/process_facts.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/system/visit_names.h"

namespace ballast::server {
namespace {

std::string ReadText(const char* path) {
  // To its end: files of /proc do not say how large they are.
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Seconds since 1970 at which the system was started.
double BootTime() {
  for (const absl::string_view line : absl::StrSplit(ReadText("/proc/stat"), '\n')) {
    absl::string_view value = line;
    double seconds = 0;
    if (absl::ConsumePrefix(&value, "btime ") && absl::SimpleAtod(value, &seconds)) return seconds;
  }
  return 0;
}

int64_t OpenDescriptors() {
  int64_t count = 0;
  (void)VisitNames(AT_FDCWD, "/proc/self/fd", [&](const char*, int) { ++count; });
  return count;
}

}  // namespace

ProcessFacts ReadProcessFacts() {
  ProcessFacts facts;
  const std::string stat = ReadText("/proc/self/stat");
  // The name before the last parenthesis may have spaces. What follows it begins with field 3.
  const size_t name_end = stat.rfind(')');
  if (name_end != std::string::npos) {
    const std::vector<std::string> fields =
        absl::StrSplit(stat.substr(name_end + 1), ' ', absl::SkipEmpty());
    // By its number in proc(5), which begins with 1.
    const auto field = [&](size_t number) {
      double value = 0;
      if (number - 3 < fields.size()) (void)absl::SimpleAtod(fields[number - 3], &value);
      return value;
    };
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    // Of 14 and 15, user and system time, and 22, the start after boot, the unit is a tick; of 24 a
    // page.
    facts.cpu_seconds = (field(14) + field(15)) / ticks;
    facts.threads = static_cast<int64_t>(field(20));
    facts.start_time_seconds = BootTime() + field(22) / ticks;
    facts.virtual_bytes = static_cast<int64_t>(field(23));
    facts.resident_bytes = static_cast<int64_t>(field(24)) * sysconf(_SC_PAGESIZE);
  }
  facts.open_descriptors = OpenDescriptors();
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    facts.most_descriptors = static_cast<int64_t>(limit.rlim_cur);
  }
  return facts;
}

}  // namespace ballast::server
