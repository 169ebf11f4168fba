// A DeviceCollective that stages through the host: stream -> host -> the host's Collective (Gloo,
// where there are several ranks) -> stream. For several ranks on one GPU, which NCCL refuses, and
// for tests.
//
// A call returns when its results are being copied back to the device; sums are taken in order of
// rank.
#ifndef BALLAST_GPU_WORKER_DEVICE_GLOO_DEVICE_COLLECTIVE_H_
#define BALLAST_GPU_WORKER_DEVICE_GLOO_DEVICE_COLLECTIVE_H_

#include <memory>

#include "gpu_worker/collective/collective.h"
#include "gpu_worker/device/device_collective.h"

namespace ballast::worker {

// Both outlive it. Further error: RESOURCE_EXHAUSTED, the host has no memory for staging. `host` is
// used only in calls, and by no other thread then: like this object it takes one call at a time.
// The first call allocates host memory, and larger ones allocate again.
std::unique_ptr<DeviceCollective> MakeGlooDeviceCollective(Device& device, Collective& host);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_GLOO_DEVICE_COLLECTIVE_H_
