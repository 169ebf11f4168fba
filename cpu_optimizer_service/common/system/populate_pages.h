// Backs mapped memory with pages now, instead of one by one at the first access. The kernel clears
// every page, which one thread does at one or two GiB a second. So several threads do it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_POPULATE_PAGES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_POPULATE_PAGES_H_

#include <cstddef>
#include <functional>

namespace ballast {

inline constexpr size_t kPopulatePieceBytes = size_t{64} << 20;

// Like madvise(MADV_POPULATE_WRITE), piece by piece: returns 0, or the errno of a failed piece; no
// further piece is begun then. EINVAL: a kernel before 5.14. `memory` begins a page, and pieces are
// whole pages. `made` gets the size of each finished piece, on any of the threads.
int PopulatePages(std::byte* memory, size_t bytes, size_t piece_bytes = kPopulatePieceBytes,
                  const std::function<void(size_t piece_bytes)>& made = nullptr);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_POPULATE_PAGES_H_
