// Whether memory really lies in huge pages: the system only takes our wish as advice.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_HUGE_PAGES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ballast {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// The part, 0 to 1, of the memory present in the mappings that overlap [begin, end) that lies in
// huge pages, by the text of /proc/PID/smaps. Nothing if none of that memory is present, or the
// text does not say.
std::optional<double> HugePageShare(absl::string_view smaps, uintptr_t begin, uintptr_t end);
// The same of our own memory, as the system says now.
std::optional<double> HugePageShare(const std::byte* memory, int64_t bytes);

// What the system's pool of huge pages of this size still gives, in files of hugetlbfs: those that
// are free and not promised to a mapping, and those that it may add. Nothing if the system does not
// say. `pools` is where it does.
std::optional<int64_t> HugePagePoolBytes(int64_t page_bytes,
                                         const std::string& pools = "/sys/kernel/mm/hugepages");

// Empty if `share` is as it should be, else one line on `what`, with what the operator can do.
std::string HugePageWarning(std::optional<double> share, absl::string_view what);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_HUGE_PAGES_H_
