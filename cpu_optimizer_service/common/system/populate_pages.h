// Backs mapped memory with pages now, rather than one by one when each is first touched. The kernel
// clears every page, which one thread does at one or two GiB a second; so several do it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_POPULATE_PAGES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_POPULATE_PAGES_H_

#include <cstddef>
#include <functional>

namespace ballast {

inline constexpr size_t kPopulatePieceBytes = size_t{64} << 20;

// As madvise(MADV_POPULATE_WRITE), piece by piece: 0, or the errno of a piece that failed, after
// which no further one is begun. EINVAL: a kernel before 5.14. `memory` begins a page; pieces are
// whole pages.
// `made` is told the size of each piece that is there, on any of the threads.
int PopulatePages(std::byte* memory, size_t bytes, size_t piece_bytes = kPopulatePieceBytes,
                  const std::function<void(size_t piece_bytes)>& made = nullptr);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_POPULATE_PAGES_H_
