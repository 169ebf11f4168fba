// The limit that the update is held against: a loop that moves the memory an update moves, and does
// next to nothing with it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_

#include <array>
#include <cstdint>

#include "cpu_optimizer_service/common/plane.h"

namespace ballast {

// Of an update with bf16 gradients and shards: reads 2 and 4 for each plane, writes those and 2.
inline constexpr int64_t TrafficBytesPerElement(int planes) { return 2 + 2 * 4 * planes + 2; }

struct UpdateTraffic {
  int64_t elements;  // A multiple of 256.
  const uint16_t* gradient;
  // Read, and written with what they held. At least one; null: no more.
  std::array<float*, kMaxPlanes> planes;
  uint16_t* shard;  // 64-byte aligned; written past the caches.
};

// How far ahead of its use memory is asked for is what such a loop gains or loses most by: the
// roofline is the best of these.
inline constexpr int kPrefetchAheadElements[] = {512, 0, 256, 1024};

// The values must be finite; a negative zero may become zero.
void MoveTraffic(const UpdateTraffic& traffic, int prefetch_ahead_elements);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_
