#include "gpu_worker/pipeline/completions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;

TEST(Completions, CallsInOrderWhenTheWorkIsDoneAndNotBefore) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    FakeDevice device({.seed = seed});
    const auto first = device.CreateStream("first").value();
    const auto second = device.CreateStream("second").value();
    std::atomic<int> done = 0;  // As bits.
    std::vector<int> calls;
    Completions completions(device);
    ASSERT_TRUE(GiveToFakeStream(*first, "a", [&] { done |= 1; }).ok());
    ASSERT_TRUE(completions
                    .After(*first,
                           [&](const absl::Status& status) {
                             EXPECT_TRUE(status.ok());
                             EXPECT_EQ(done & 1, 1);
                             calls.push_back(1);
                           })
                    .ok());
    completions.AfterThose([&](const absl::Status&) { calls.push_back(2); });
    ASSERT_TRUE(GiveToFakeStream(*second, "b", [&] { done |= 2; }).ok());
    ASSERT_TRUE(completions
                    .After(*second,
                           [&](const absl::Status&) {
                             EXPECT_EQ(done & 2, 2);
                             calls.push_back(3);
                           })
                    .ok());
    completions.WaitIdle();
    EXPECT_THAT(calls, ElementsAre(1, 2, 3));
  }
}

TEST(Completions, LetsGoOfWhatACallHoldsBeforeItIsIdle) {
  FakeDevice device;
  const auto stream = device.CreateStream("stream").value();
  Completions completions(device);
  const auto held = std::make_shared<int>(0);
  ASSERT_TRUE(completions.After(*stream, [held](const absl::Status&) {}).ok());
  completions.WaitIdle();
  EXPECT_EQ(held.use_count(), 1);
}

TEST(Completions, MakesTheCallsThatAreOwedWithTheErrorOfALostDevice) {
  std::atomic<bool> lost = false;
  std::vector<absl::StatusCode> calls;
  FakeDevice device({.fail = [&](absl::string_view, absl::string_view) {
    return lost ? absl::UnavailableError("lost") : absl::OkStatus();
  }});
  const auto stream = device.CreateStream("stream").value();
  const auto note = [&](const absl::Status& status) { calls.push_back(status.code()); };
  {
    std::atomic<bool> go = false;
    Completions completions(device);
    // The thread is held up, so that the device is lost before it waits for the stream.
    completions.AfterThose([&](const absl::Status&) {
      while (!go) std::this_thread::yield();
    });
    ASSERT_TRUE(completions.After(*stream, note).ok());
    completions.AfterThose(note);
    lost = true;
    EXPECT_FALSE(completions.After(*stream, note).ok());
    go = true;
  }
  EXPECT_THAT(calls, ElementsAre(absl::StatusCode::kUnavailable, absl::StatusCode::kOk));
}

}  // namespace
}  // namespace ballast::worker
