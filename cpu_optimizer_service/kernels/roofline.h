// The limit that the update is held against: a loop that moves the memory an update moves, and does
// next to nothing with it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_

#include <cstdint>

#include "cpu_optimizer_service/common/packed/slot.h"

namespace ballast {

struct UpdateTraffic {
  int64_t elements;          // A multiple of kPackedGroup.
  const uint16_t* gradient;  // Read.
  // Read, and written with what they held: its planes that are not null, the master's among them. At
  // most kMaxPlanes of values.
  Slot state;
  uint16_t* shard;  // 64-byte aligned; written past the caches.
};

// How far ahead of its use memory is asked for is what such a loop gains or loses most by: the
// roofline is the best of these.
inline constexpr int kPrefetchAheadElements[] = {512, 0, 256, 1024};

// The gradient's bits under `mask` are set in what is written; in scales, one lane's bits. With a mask
// tests see that all is read and written.
void MoveTraffic(const UpdateTraffic& traffic, int prefetch_ahead_elements, uint16_t mask = 0);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_
