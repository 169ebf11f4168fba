// How staging through the host fails, and what it holds; device_collective_contract_test.cc has the
// rest.
#include "gpu_worker/device/gloo_device_collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "gpu_worker/collective/single_collective.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;

constexpr Purpose kPurpose = {.step = 7, .bucket = 3};

// Calls that move `elements` from the beginning of `memory`, which has a shard's room behind.
absl::Status Reduce(DeviceCollective& collective, DeviceStream& stream, const DeviceMemory& memory,
                    int64_t elements) {
  return collective.ReduceScatterSum(stream, memory.as<float>(),
                                     memory.as<float>() + collective.world_size() * elements,
                                     elements, kPurpose);
}
absl::Status Gather(DeviceCollective& collective, DeviceStream& stream, const DeviceMemory& memory,
                    size_t bytes) {
  return collective.AllGather(stream, memory.data(), memory.data(), bytes, kPurpose);
}

TEST(GlooDeviceCollective, APeerThatNeverCallsGivesAnErrorThatNamesRankBucketAndStep) {
  std::atomic<bool> reported = false;
  RunRanks(Backend::kGloo, 2, std::chrono::milliseconds(500), [&](Collective& host) {
    if (host.rank() == 1) {
      reported.wait(false);  // There, but in no collective.
      return;
    }
    FakeDevice device;
    const auto stream = device.CreateStream("communicate").value();
    const auto memory = device.Allocate(1024, "gradients").value();
    const auto collective = MakeGlooDeviceCollective(device, host);
    const absl::Status late = Reduce(*collective, *stream, *memory, 8);
    EXPECT_TRUE(Refused(late, absl::StatusCode::kDeadlineExceeded));
    EXPECT_EQ(Gather(*collective, *stream, *memory, 8), late);
    EXPECT_EQ(collective->Finish(), late);
    reported = true;
    reported.notify_all();
  });
}

TEST(GlooDeviceCollective, ALostDeviceIsNamedHereAndItsRankByTheOthers) {
  RunRanks(Backend::kGloo, 2, std::chrono::seconds(20), [&](Collective& host) {
    FakeDevice device({.fail = [&](absl::string_view operation, absl::string_view) -> absl::Status {
      if (host.rank() == 0 || operation != "copy to host") return absl::OkStatus();
      return absl::UnavailableError("GPU 0 fell off the bus");
    }});
    const auto stream = device.CreateStream("communicate").value();
    const auto memory = device.Allocate(1024, "gradients").value();
    const auto collective = MakeGlooDeviceCollective(device, host);
    const absl::Status status = Reduce(*collective, *stream, *memory, 8);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(status.message(),
                testing::HasSubstr(host.rank() == 0 ? "rank 1" : "GPU 0 fell off"));
    EXPECT_EQ(collective->Finish(), status);
  });
}

TEST(GlooDeviceCollective, FinishNamesTheCallThatTheDeviceWasLostIn) {
  bool lose = false;
  FakeDevice device({.fail = [&](absl::string_view operation, absl::string_view) -> absl::Status {
    if (!lose || operation != "synchronize") return absl::OkStatus();
    return absl::UnavailableError("GPU 0 fell off the bus");
  }});
  SingleCollective host;
  const auto stream = device.CreateStream("communicate").value();
  const auto memory = device.Allocate(1024, "gradients").value();
  const auto collective = MakeGlooDeviceCollective(device, host);
  ASSERT_TRUE(Gather(*collective, *stream, *memory, 8).ok());
  lose = true;
  EXPECT_EQ(
      collective->Finish(),
      absl::UnavailableError("rank 0: all-gather of bucket 3, step 7: GPU 0 fell off the bus"));
}

TEST(GlooDeviceCollective, AllocatesHostMemoryOnceForItsLargestCall) {
  int allocated = 0;
  FakeDevice device({.fail = [&](absl::string_view operation, absl::string_view) -> absl::Status {
    if (operation == "allocate host") ++allocated;
    return absl::OkStatus();
  }});
  SingleCollective host;
  const auto stream = device.CreateStream("communicate").value();
  const auto memory = device.Allocate(4096, "gradients").value();
  const auto collective = MakeGlooDeviceCollective(device, host);
  std::vector<int> seen;
  for (const int64_t elements : {64, 64, 8, 64, 128, 100}) {
    ASSERT_TRUE(Reduce(*collective, *stream, *memory, elements).ok());
    ASSERT_TRUE(Gather(*collective, *stream, *memory, elements * sizeof(float)).ok());
    seen.push_back(allocated);
  }
  EXPECT_THAT(seen, ElementsAre(1, 1, 1, 1, 2, 2));
}

TEST(GlooDeviceCollective, SaysWhatTheHostHasNoMemoryFor) {
  FakeDevice device({.fail = [](absl::string_view operation, absl::string_view) -> absl::Status {
    if (operation != "allocate host") return absl::OkStatus();
    return absl::ResourceExhaustedError("no memory");
  }});
  SingleCollective host;
  const auto stream = device.CreateStream("communicate").value();
  const auto memory = device.Allocate(64, "gradients").value();
  const auto collective = MakeGlooDeviceCollective(device, host);
  EXPECT_EQ(Gather(*collective, *stream, *memory, 8),
            absl::ResourceExhaustedError("rank 0: all-gather of bucket 3, step 7: no memory"));
}

TEST(GlooDeviceCollective, GoesOnWithPageableMemory) {
  FakeDevice device({.can_pin = false});
  SingleCollective host;
  const auto stream = device.CreateStream("communicate").value();
  const auto memory = device.Allocate(64, "gradients").value();
  const auto collective = MakeGlooDeviceCollective(device, host);
  std::vector<float> values = {1, 2, 3, 4}, sums(4);
  ASSERT_TRUE(
      stream
          ->CopyToDevice(memory->data(),
                         absl::MakeConstSpan(reinterpret_cast<std::byte*>(values.data()), 16))
          .ok());
  ASSERT_TRUE(Reduce(*collective, *stream, *memory, 4).ok());
  ASSERT_TRUE(stream
                  ->CopyToHost(absl::MakeSpan(reinterpret_cast<std::byte*>(sums.data()), 16),
                               memory->data() + 16)
                  .ok());
  EXPECT_EQ(sums, values);
}

}  // namespace
}  // namespace ballast::worker
