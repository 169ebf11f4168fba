// What ranks do together with memory of their devices, in stream order. Every rank makes the same
// calls in the same order with the same sizes.
//
// A call may return before its work is done, or even begun; it is done in the order of `stream`.
// nccl_collective.h is the one for several GPUs; gloo_device_collective.h stages through the host,
// for several ranks on one GPU and for tests; single_device_collective.h is a world of one.
//
// Sums are the same bits on every rank and in every run with the same world, library and devices;
// in what order ranks are added is the library's choice.
//
// Errors: UNAVAILABLE or DEADLINE_EXCEEDED that names this rank and what the call was for
// (`Purpose` below), from the call itself or, where it returned before, from a later one or from
// Finish. After an error every later call returns it. Work that was aborted ends on the device like
// any other, with results that are not whole: what a collective has made may be used for good only
// after Finish has returned OK.
//
// Threads: one call at a time.
#ifndef BALLAST_GPU_WORKER_DEVICE_DEVICE_COLLECTIVE_H_
#define BALLAST_GPU_WORKER_DEVICE_DEVICE_COLLECTIVE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

// What a collective is for, as an error names it: "rank 1: reduce-scatter of bucket 3, step 7".
struct Purpose {
  uint64_t step = 0;
  int bucket = 0;
};

class DeviceCollective {
 public:
  virtual ~DeviceCollective() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // shard[i] = sum over ranks of input[rank() * shard_elements + i]. `input` has world_size() *
  // shard_elements elements; nothing of it is written except `shard`, which is its own place in
  // `input` or lies outside it.
  virtual absl::Status ReduceScatterSum(DeviceStream& stream, const float* input, float* shard,
                                        int64_t shard_elements, const Purpose& purpose) = 0;
  // all[r * shard_bytes + i] = shard[i] of rank r. `shard` may be its own place in `all`.
  virtual absl::Status AllGather(DeviceStream& stream, const std::byte* shard, std::byte* all,
                                 size_t shard_bytes, const Purpose& purpose) = 0;
  // Waits until all calls so far are done, on this rank, or one has failed.
  virtual absl::Status Finish() = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_DEVICE_COLLECTIVE_H_
