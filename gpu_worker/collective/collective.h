// Collective operations. Every rank makes the same calls in the same order with the same sizes.
//
// Sums are taken in order of rank, so they have the same bits in every run and on every rank.
//
// Threads: one call at a time; different threads may take turns. A call returns when this rank's
// result is complete, which may be before other ranks'.
//
// Errors: UNAVAILABLE or DEADLINE_EXCEEDED with this rank, the operation, and the awaited rank.
// After an error every later call returns it, because ranks may be at different operations then. If
// a peer's connection closed, the error has the payload kPeerLost.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_COLLECTIVE_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_COLLECTIVE_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ballast::worker {

inline constexpr char kPeerLost[] = "ballast/peer-lost";

class Collective {
 public:
  virtual ~Collective() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // shard[i] = sum over ranks of input[rank() * shard.size() + i]. `input` has
  // world_size() * shard.size() elements and is not written; `shard` lies outside it.
  virtual absl::Status ReduceScatterSum(absl::Span<const float> input, absl::Span<float> shard) = 0;

  // all[r * shard.size() + i] = shard[i] of rank r. `shard` may be its own place in `all`.
  virtual absl::Status AllGather(absl::Span<const std::byte> shard, absl::Span<std::byte> all) = 0;

  // values[i] = sum over ranks of values[i].
  virtual absl::Status AllReduceSum(absl::Span<double> values) = 0;

  // Rank 0's bytes, on every rank.
  virtual absl::Status Broadcast(absl::Span<std::byte> bytes) = 0;

  // Returns when every rank has called it.
  virtual absl::Status Barrier() = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_COLLECTIVE_H_
