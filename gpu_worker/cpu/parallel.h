// Parallel loops over fixed tiles. The tiles, and so the arithmetic inside each, do not depend on
// the number of threads; tiles write disjoint memory.
#ifndef BALLAST_GPU_WORKER_CPU_PARALLEL_H_
#define BALLAST_GPU_WORKER_CPU_PARALLEL_H_

#include <tbb/parallel_for.h>

#include <algorithm>

namespace ballast::worker::cpu {

// Calls body(begin, end) for [0, tile), [tile, 2 * tile), ... up to `count`.
template <typename Body>
void ForEachTile(int count, int tile, const Body& body) {
  tbb::parallel_for(0, (count + tile - 1) / tile,
                    [&](int index) { body(index * tile, std::min(count, (index + 1) * tile)); });
}

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_PARALLEL_H_
