// What only the world of one does; device_collective_contract_test.cc has the rest.
#include "gpu_worker/device/single_device_collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker {
namespace {

TEST(SingleDeviceCollective, MovesNothingThatIsInItsPlace) {
  FakeDevice device({.fail = [](absl::string_view operation, absl::string_view) -> absl::Status {
    EXPECT_NE(operation, "copy on device");
    return absl::OkStatus();
  }});
  const auto stream = device.CreateStream("communicate").value();
  const auto memory = device.Allocate(16, "gradients").value();
  const auto collective = MakeSingleDeviceCollective(device);
  auto* values = memory->as<float>();
  EXPECT_TRUE(collective->ReduceScatterSum(*stream, values, values, 4, {}).ok());
  EXPECT_TRUE(collective->AllGather(*stream, memory->data(), memory->data(), 16, {}).ok());
  EXPECT_TRUE(collective->Finish().ok());
}

TEST(SingleDeviceCollective, NamesWhatFailedAndReturnsItFromThenOn) {
  FakeDevice device({.fail = [](absl::string_view operation, absl::string_view) -> absl::Status {
    if (operation != "copy on device") return absl::OkStatus();
    return absl::UnavailableError("GPU 0 fell off the bus");
  }});
  const auto stream = device.CreateStream("communicate").value();
  const auto memory = device.Allocate(32, "gradients").value();
  const auto collective = MakeSingleDeviceCollective(device);
  auto* values = memory->as<float>();
  const absl::Status lost =
      absl::UnavailableError("rank 0: reduce-scatter of bucket 3, step 7: GPU 0 fell off the bus");
  EXPECT_EQ(collective->ReduceScatterSum(*stream, values, values + 4, 4, {.step = 7, .bucket = 3}),
            lost);
  EXPECT_EQ(collective->AllGather(*stream, memory->data(), memory->data(), 32, {}), lost);
  EXPECT_EQ(collective->Finish(), lost);
}

TEST(SingleDeviceCollective, FinishNamesTheCallThatTheDeviceWasLostIn) {
  bool lose = false;
  FakeDevice device({.fail = [&](absl::string_view operation, absl::string_view) -> absl::Status {
    if (!lose || operation != "synchronize") return absl::OkStatus();
    return absl::UnavailableError("GPU 0 fell off the bus");
  }});
  const auto stream = device.CreateStream("communicate").value();
  const auto memory = device.Allocate(32, "weights").value();
  const auto collective = MakeSingleDeviceCollective(device);
  EXPECT_TRUE(
      collective
          ->AllGather(*stream, memory->data(), memory->data() + 16, 16, {.step = 2, .bucket = 5})
          .ok());
  lose = true;
  EXPECT_EQ(
      collective->Finish(),
      absl::UnavailableError("rank 0: all-gather of bucket 5, step 2: GPU 0 fell off the bus"));
}

}  // namespace
}  // namespace ballast::worker
