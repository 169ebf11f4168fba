// Whether memory really lies in huge pages: to the system the request is only advice.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_HUGE_PAGES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ballast {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// The fraction of present memory, in mappings that overlap [begin, end), that lies in huge pages,
// from the text of /proc/PID/smaps. Empty if no such memory is present, or the text does not say.
std::optional<double> HugePageShare(absl::string_view smaps, uintptr_t begin, uintptr_t end);
// The same for this process's memory now.
std::optional<double> HugePageShare(const std::byte* memory, int64_t bytes);

// The free bytes of the system's pool of huge pages of this size, for files of hugetlbfs: free
// pages that are not promised to a mapping, and pages that it may add. Empty if the system does not
// say. `pools` is the system's folder.
std::optional<int64_t> HugePagePoolBytes(int64_t page_bytes,
                                         const std::string& pools = "/sys/kernel/mm/hugepages");

// Empty if `share` is as expected; else one line about `what`, with what the operator can do.
std::string HugePageWarning(std::optional<double> share, absl::string_view what);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_HUGE_PAGES_H_
