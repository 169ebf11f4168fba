// Worlds of GPUs for the contract of DeviceCollective: one rank, NCCL of one rank and of as many as
// there are GPUs, and two ranks on one GPU, which only Gloo joins.
#include <chrono>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gpu_worker/cuda/cuda_device.h"
#include "gpu_worker/cuda/libraries.h"
#include "gpu_worker/cuda/nccl_collective.h"
#include "gpu_worker/device/gloo_device_collective.h"
#include "gpu_worker/device/single_device_collective.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/device/device_worlds.h"

namespace ballast::worker {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(60);

std::unique_ptr<DeviceCollective> JoinNobody(CudaDevice& device, Collective&) {
  return MakeSingleDeviceCollective(device);
}
std::unique_ptr<DeviceCollective> JoinByGloo(CudaDevice& device, Collective& host) {
  return MakeGlooDeviceCollective(device, host);
}
std::unique_ptr<DeviceCollective> JoinByNccl(CudaDevice& device, Collective& host) {
  return ConnectNccl(device, host, kTimeout).value();
}

using Join = std::unique_ptr<DeviceCollective> (*)(CudaDevice&, Collective&);

// Rank r has GPU r, counted round.
DeviceWorld WorldOf(const std::string& name, int world_size, Join join) {
  return {.name = name,
          .world_size = world_size,
          .missing = "",
          .run = [=](const std::function<void(const DeviceRank&)>& body) {
            RunRanks(world_size, [&](Collective& host) {
              const std::unique_ptr<CudaDevice> device = CudaDevice::Open(host.rank()).value();
              const std::unique_ptr<DeviceCollective> collective = join(*device, host);
              body({.device = *device, .collective = *collective});
            });
          }};
}

}  // namespace

std::vector<DeviceWorld> DeviceWorlds() {
  const absl::StatusOr<int> gpus = CudaDevice::Count();
  std::vector<DeviceWorld> worlds = {WorldOf("Single", 1, JoinNobody),
                                     WorldOf("Gloo2", 2, JoinByGloo),
                                     WorldOf("Nccl1", 1, JoinByNccl)};
  if (gpus.value_or(0) > 1) {
    worlds.push_back(WorldOf(absl::StrCat("Nccl", *gpus), *gpus, JoinByNccl));
  }
  const absl::Status nccl = LoadNccl().status();
  for (DeviceWorld& world : worlds) {
    if (!nccl.ok() && absl::StartsWith(world.name, "Nccl"))
      world.missing = std::string(nccl.message());
    if (!gpus.ok()) world.missing = std::string(gpus.status().message());
  }
  return worlds;
}

}  // namespace ballast::worker
