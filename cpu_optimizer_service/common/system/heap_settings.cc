#include "cpu_optimizer_service/common/system/heap_settings.h"

#include <malloc.h>

#include <algorithm>

namespace ballast {
namespace {

// gRPC receives into slices from malloc. With glibc's own thresholds the top of the heap, and every
// block above the mmap threshold, goes back to the system as soon as it is free, and is faulted in
// again for the next message: 2.2 instead of 4.0 GB/s over loopback, measured.
//
// Beyond this much free memory the heap is still trimmed, so that a burst is not kept for ever.
constexpr int kTrimThresholdBytes = 512 << 20;
// Setting one threshold stops glibc from adapting the other, which then stays at 128 KiB, below a
// message. This is the most that it accepts, on 64-bit systems; messages and the slices of their
// payloads are smaller, the engine's arenas are mapped by themselves.
constexpr int kMmapThresholdBytes = 32 << 20;

}  // namespace

void KeepHeapWarm() {
  static const bool done = [] {
    mallopt(M_TRIM_THRESHOLD, kTrimThresholdBytes);
    mallopt(M_MMAP_THRESHOLD, kMmapThresholdBytes);
    return true;
  }();
  static_cast<void>(done);
}

void KeepHeapInOneArena() { mallopt(M_ARENA_MAX, 1); }

HeapTrimmer::HeapTrimmer()
    : HeapTrimmer([] { return mallinfo2().fordblks; }, [] { malloc_trim(0); }) {}

void HeapTrimmer::Tick() {
  always_free_bytes_ = std::min(always_free_bytes_, free_bytes_());
  if (++ticks_ < wait_) return;
  if (always_free_bytes_ > kKeptBytes) {
    trim_();
    // Should it be free again by the next time, then because it is used and freed all the time.
    wait_ = std::min(2 * wait_, kLongestWait);
  } else {
    wait_ = kShortestWait;
  }
  ticks_ = 0;
  always_free_bytes_ = static_cast<size_t>(-1);
}

}  // namespace ballast
