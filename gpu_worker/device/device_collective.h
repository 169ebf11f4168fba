// Collective operations on the devices' memory, in stream order. Every rank makes the same calls in
// the same order with the same sizes.
//
// A call may return before its work is done, or even begun; the work is done in the order of
// `stream`. nccl_collective.h is for several GPUs. gloo_device_collective.h stages through the
// host, for several ranks on one GPU and for tests. single_device_collective.h is a world of one.
//
// Sums have the same bits on every rank and in every run with the same world, library and devices.
// The library chooses the order in which ranks are added.
//
// Errors: UNAVAILABLE or DEADLINE_EXCEEDED with this rank and the purpose of the call (`Purpose`
// below), from the call itself or, if it returned earlier, from a later one or from Finish. After
// an error every later call returns it. Aborted work ends on the device like other work, with
// incomplete results. So results are final only after Finish has returned OK.
//
// Threads: one call at a time.
#ifndef BALLAST_GPU_WORKER_DEVICE_DEVICE_COLLECTIVE_H_
#define BALLAST_GPU_WORKER_DEVICE_DEVICE_COLLECTIVE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

// A collective's purpose in an error: "rank 1: reduce-scatter of bucket 3, step 7".
struct Purpose {
  uint64_t step = 0;
  int bucket = 0;  // -1: matrices (muon/matrix_turns.h).

  std::string ToString() const {
    const std::string what = bucket < 0 ? "matrices" : absl::StrCat("bucket ", bucket);
    return absl::StrCat(what, ", step ", step);
  }
};

class DeviceCollective {
 public:
  virtual ~DeviceCollective() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // shard[i] = sum over ranks of input[rank() * shard_elements + i]. `input` has world_size() *
  // shard_elements elements. Only `shard` is written, which is its own place in `input` or lies
  // outside it.
  virtual absl::Status ReduceScatterSum(DeviceStream& stream, const float* input, float* shard,
                                        int64_t shard_elements, const Purpose& purpose) = 0;
  // all[r * shard_bytes + i] = shard[i] of rank r. `shard` may be its own place in `all`.
  virtual absl::Status AllGather(DeviceStream& stream, const std::byte* shard, std::byte* all,
                                 size_t shard_bytes, const Purpose& purpose) = 0;
  // Waits until all calls so far are done on this rank, or one has failed.
  virtual absl::Status Finish() = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_DEVICE_COLLECTIVE_H_
