// Worlds of the tests' device: one rank alone, and ranks whose collectives go through the host.
#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "gpu_worker/device/gloo_device_collective.h"
#include "gpu_worker/device/single_device_collective.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/device/device_worlds.h"

namespace ballast::worker {
namespace {

// The latest device and the earliest, and one between.
constexpr uint64_t kSeeds[] = {0, 1, 3};

DeviceWorld Single(uint64_t seed) {
  return {.name = absl::StrCat("SingleSeed", seed),
          .world_size = 1,
          .missing = "",
          .run = [seed](const std::function<void(const DeviceRank&)>& body) {
            FakeDevice device({.seed = seed});
            const std::unique_ptr<DeviceCollective> collective = MakeSingleDeviceCollective(device);
            body({.device = device, .collective = *collective});
          }};
}

DeviceWorld Gloo(int world_size, uint64_t seed) {
  return {.name = absl::StrCat("Gloo", world_size, "Seed", seed),
          .world_size = world_size,
          .missing = "",
          .run = [=](const std::function<void(const DeviceRank&)>& body) {
            RunRanks(Backend::kGloo, world_size, std::chrono::seconds(60), [&](Collective& host) {
              FakeDevice device({.seed = seed + 4 * host.rank()});
              const std::unique_ptr<DeviceCollective> collective =
                  MakeGlooDeviceCollective(device, host);
              body({.device = device, .collective = *collective});
            });
          }};
}

}  // namespace

std::vector<DeviceWorld> DeviceWorlds() {
  std::vector<DeviceWorld> worlds;
  for (const uint64_t seed : kSeeds) {
    worlds.push_back(Single(seed));
    for (int world_size = 1; world_size <= 4; ++world_size) {
      worlds.push_back(Gloo(world_size, seed));
    }
  }
  return worlds;
}

}  // namespace ballast::worker
