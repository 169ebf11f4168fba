// The limit that the update is held against: a loop that moves the memory an update moves, and does
// next to nothing with it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_

#include <cstdint>

namespace ballast {

// Of an update with bf16 gradients and shards: reads 2 + 4 + 4 + 4, writes 4 + 4 + 4 + 2.
inline constexpr int64_t kAdamTrafficBytesPerElement = 28;

struct AdamTraffic {
  int64_t elements;  // A multiple of 256.
  const uint16_t* gradient;
  float* planes[3];  // Read, and written with what they held.
  uint16_t* shard;   // 64-byte aligned; written past the caches.
};

// How far ahead of its use memory is asked for is what such a loop gains or loses most by: the
// roofline is the best of these.
inline constexpr int kPrefetchAheadElements[] = {512, 0, 256, 1024};

// The values must be finite; a negative zero may become zero.
void MoveAdamTraffic(const AdamTraffic& traffic, int prefetch_ahead_elements);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_ROOFLINE_H_
