// Parallel loops over fixed tiles. The tiles, and so the arithmetic inside each, do not depend on
// the number of threads; tiles write disjoint memory.
#ifndef BALLAST_GPU_WORKER_CPU_PARALLEL_H_
#define BALLAST_GPU_WORKER_CPU_PARALLEL_H_

#include <algorithm>
#include <cstdint>

#include "cpu_optimizer_service/common/system/parallel_for.h"

namespace ballast::worker::cpu {

// Calls body(begin, end) for [0, tile), [tile, 2 * tile), ... up to `count`.
template <typename Body>
void ForEachTile(int count, int tile, const Body& body) {
  ParallelFor((count + tile - 1) / tile, [&](int64_t index) {
    const int begin = static_cast<int>(index) * tile;
    body(begin, std::min(count, begin + tile));
  });
}

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_PARALLEL_H_
