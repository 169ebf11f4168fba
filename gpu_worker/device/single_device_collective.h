// The collective of a world of one rank: copies on the stream, unless a shard is already in place.
#ifndef BALLAST_GPU_WORKER_DEVICE_SINGLE_DEVICE_COLLECTIVE_H_
#define BALLAST_GPU_WORKER_DEVICE_SINGLE_DEVICE_COLLECTIVE_H_

#include <memory>

#include "gpu_worker/device/device_collective.h"

namespace ballast::worker {

// `device` outlives it.
std::unique_ptr<DeviceCollective> MakeSingleDeviceCollective(Device& device);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_SINGLE_DEVICE_COLLECTIVE_H_
