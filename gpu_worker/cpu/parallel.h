// Parallel loops over fixed tiles. The tiles, and so the arithmetic inside each, do not depend on
// the number of threads; tiles write disjoint memory.
#ifndef BALLAST_GPU_WORKER_CPU_PARALLEL_H_
#define BALLAST_GPU_WORKER_CPU_PARALLEL_H_

#include <algorithm>
#include <cstdint>

#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/system/parallel_for.h"

namespace ballast::worker::cpu {

inline constexpr int kTileRows = 64;
inline constexpr int kTileColumns = 64;

// Calls body(begin, end) for [0, tile), [tile, 2 * tile), ... up to `count`.
template <typename Body>
void ForEachTile(int count, int tile, const Body& body) {
  ParallelFor(DivideUp(count, tile), [&](int64_t index) {
    const int begin = static_cast<int>(index) * tile;
    body(begin, std::min(count, begin + tile));
  });
}

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_PARALLEL_H_
