// The worlds that the contract of DeviceCollective is tested in. A test binary links one file that
// defines DeviceWorlds: fake_device_worlds.cc, or one with real devices.
#ifndef BALLAST_TESTS_GPU_WORKER_DEVICE_DEVICE_WORLDS_H_
#define BALLAST_TESTS_GPU_WORKER_DEVICE_DEVICE_WORLDS_H_

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "gpu_worker/device/device.h"
#include "gpu_worker/device/device_collective.h"

namespace ballast::worker {

struct DeviceRank {
  Device& device;
  DeviceCollective& collective;
};

struct DeviceWorld {
  std::string name;  // Letters and digits, for the tests' names.
  int world_size = 1;
  std::string missing;  // Why this machine does not have it; tests then skip with this reason.
  // Calls `body` for each rank, on a thread of its own if there are several, and waits for all.
  std::function<void(const std::function<void(const DeviceRank& rank)>& body)> run;
};

std::vector<DeviceWorld> DeviceWorlds();

inline void PrintTo(const DeviceWorld& world, std::ostream* out) { *out << world.name; }

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_DEVICE_DEVICE_WORLDS_H_
