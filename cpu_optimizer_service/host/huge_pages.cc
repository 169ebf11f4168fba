#include "cpu_optimizer_service/host/huge_pages.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {
namespace {

// Unreadable files are empty.
std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// "7f0000000000-7f0000200000 rw-p ...": the first line of a mapping.
bool ParseRange(absl::string_view line, uintptr_t& begin, uintptr_t& end) {
  const std::vector<absl::string_view> ends = absl::StrSplit(line.substr(0, line.find(' ')), '-');
  uint64_t from = 0;
  uint64_t to = 0;
  if (ends.size() != 2 || !absl::SimpleHexAtoi(ends[0], &from) ||
      !absl::SimpleHexAtoi(ends[1], &to)) {
    return false;
  }
  begin = from;
  end = to;
  return true;
}

// "Rss:     1024 kB", or 0 for another line.
int64_t KibOf(absl::string_view line, absl::string_view name) {
  if (!absl::StartsWith(line, name)) return 0;
  const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  int64_t kib = 0;
  return words.size() == 3 && absl::SimpleAtoi(words[1], &kib) ? kib : 0;
}

}  // namespace

std::optional<double> HugePageShare(absl::string_view smaps, uintptr_t begin, uintptr_t end) {
  int64_t present_kib = 0;
  int64_t huge_kib = 0;
  bool overlaps = false;
  for (const absl::string_view line : absl::StrSplit(smaps, '\n')) {
    uintptr_t from = 0;
    uintptr_t to = 0;
    // proc(5): a line with the addresses begins a mapping, and lines with its figures follow. smaps
    // has one figure for a whole mapping, so what lies outside of [begin, end) in it counts as
    // well.
    if (ParseRange(line, from, to)) {
      overlaps = from < end && begin < to;
    } else if (overlaps) {
      present_kib += KibOf(line, "Rss:");
      // Huge pages of files and of shared memory stand in other lines; this is asked of anonymous
      // memory.
      huge_kib += KibOf(line, "AnonHugePages:");
    }
  }
  if (present_kib == 0) return std::nullopt;
  return static_cast<double>(huge_kib) / static_cast<double>(present_kib);
}

std::optional<double> HugePageShare(const std::byte* memory, int64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  return HugePageShare(ReadAll("/proc/self/smaps"), begin, begin + bytes);
}

std::optional<int64_t> HugePagePoolBytes(int64_t page_bytes, const std::string& pools) {
  const std::string pool = absl::StrCat(pools, "/hugepages-", page_bytes / 1024, "kB/");
  const auto read = [&](const char* name) -> std::optional<int64_t> {
    int64_t pages = 0;
    if (!absl::SimpleAtoi(ReadAll(pool + name), &pages)) return std::nullopt;
    return pages;
  };
  const std::optional<int64_t> free = read("free_hugepages");
  if (!free.has_value()) return std::nullopt;
  // The kernel's hugetlbpage.rst: surplus pages are those beyond the pool, at most
  // nr_overcommit_hugepages of them; of the free pages some are reserved for mappings that have not
  // touched them yet.
  const int64_t added =
      read("nr_overcommit_hugepages").value_or(0) - read("surplus_hugepages").value_or(0);
  const int64_t pages = *free - read("resv_hugepages").value_or(0) + std::max<int64_t>(added, 0);
  return std::max<int64_t>(pages, 0) * page_bytes;
}

std::string HugePageWarning(std::optional<double> share, absl::string_view what) {
  constexpr double kEnough = 0.8;
  if (!share.has_value() || *share >= kEnough) return "";
  std::string setting = ReadAll("/sys/kernel/mm/transparent_hugepage/enabled");
  while (!setting.empty() && setting.back() == '\n') setting.pop_back();
  return absl::StrCat("huge pages: ", what, " got ", std::lround(100 * *share),
                      "% of its memory in them, and is slower for the rest; "
                      "/sys/kernel/mm/transparent_hugepage/enabled is \"",
                      setting, "\" (wanted: madvise or always), or free memory is fragmented");
}

}  // namespace ballast
