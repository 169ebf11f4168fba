// The tests' device is what other tests believe; here is why they may.
#include "tests/gpu_emulator/fake_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/sanitizers.h"

namespace ballast::worker {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsSupersetOf;
using testing::UnorderedElementsAre;

constexpr uint64_t kSeeds = 40;

// A device, two streams, and what their work wrote to a diary, in the order in which it was done.
struct Story {
  explicit Story(FakeDeviceOptions options) : device(std::move(options)) {
    a = device.CreateStream("a").value();
    b = device.CreateStream("b").value();
    event = device.CreateEvent().value();
  }
  explicit Story(uint64_t seed = 0) : Story(FakeDeviceOptions{.seed = seed}) {}

  void Write(DeviceStream& stream, char entry) {
    ASSERT_EQ(GiveToFakeStream(stream, "write", [this, entry] { diary += entry; }),
              absl::OkStatus());
  }
  void Write(DeviceStream& stream, absl::string_view entries) {
    for (const char entry : entries) Write(stream, entry);
  }

  std::string diary;
  FakeDevice device;
  std::unique_ptr<DeviceStream> a;
  std::unique_ptr<DeviceStream> b;
  std::unique_ptr<DeviceEvent> event;
};

absl::Span<std::byte> Bytes(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)};
}

std::unique_ptr<HostMemory> Pinned(FakeDevice& device, absl::Span<const std::byte> bytes) {
  auto memory = device.AllocateHost(bytes.size(), "test").value();
  std::copy(bytes.begin(), bytes.end(), memory->bytes().begin());
  return memory;
}

// ---------------------------------------------------------------- order

TEST(FakeDevice, KeepsTheOrderOfAStream) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Story story(seed);
    story.Write(*story.a, "abcdefgh");
    ASSERT_TRUE(story.a->Synchronize().ok());
    ASSERT_EQ(story.diary, "abcdefgh") << seed;
  }
}

TEST(FakeDevice, DoesTwoStreamsInEveryOrderThatEventsLeaveOpen) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < 10 * kSeeds; ++seed) {
    Story story(seed);
    story.Write(*story.a, "ab");
    story.Write(*story.b, "xy");
    ASSERT_TRUE(story.a->Synchronize().ok());
    ASSERT_TRUE(story.b->Synchronize().ok());
    seen.insert(story.diary);
  }
  EXPECT_THAT(seen, UnorderedElementsAre("abxy", "axby", "axyb", "xaby", "xayb", "xyab"));
}

TEST(FakeDevice, DoesWorkAfterTheEventThatItWaitsFor) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Story story(seed);
    story.Write(*story.a, "ab");
    ASSERT_TRUE(story.a->Record(*story.event).ok());
    ASSERT_TRUE(story.b->Wait(*story.event).ok());
    story.Write(*story.b, "xy");
    ASSERT_TRUE(story.b->Synchronize().ok());
    ASSERT_EQ(story.diary, "abxy") << seed;
  }
}

TEST(FakeDevice, WaitsForAnEventAsItWasRecordedLastBeforeTheWait) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Story story(seed);
    story.Write(*story.a, 'a');
    ASSERT_TRUE(story.a->Record(*story.event).ok());
    ASSERT_TRUE(story.b->Wait(*story.event).ok());
    story.Write(*story.a, 'b');
    ASSERT_TRUE(story.a->Record(*story.event).ok());  // The wait before knows nothing of it.
    story.Write(*story.b, 'x');
    ASSERT_TRUE(story.b->Synchronize().ok());
    ASSERT_TRUE(story.event->Synchronize().ok());
    seen.insert(story.diary);
  }
  EXPECT_THAT(seen, UnorderedElementsAre("axb", "abx"));
}

TEST(FakeDevice, AnEventNeverRecordedHoldsUpNothing) {
  Story story;
  ASSERT_TRUE(story.a->Wait(*story.event).ok());
  story.Write(*story.a, 'a');
  EXPECT_TRUE(story.event->Done().value());
  EXPECT_TRUE(story.event->Synchronize().ok());
  EXPECT_TRUE(story.a->Synchronize().ok());
  EXPECT_EQ(story.diary, "a");
}

TEST(FakeDevice, GivesTheSameOrderToTheSameSeed) {
  for (uint64_t seed = 0; seed < kSeeds; seed += 4) {  // Those that do nothing early.
    std::set<std::string> seen;
    for (int run = 0; run < 5; ++run) {
      Story story(seed);
      const auto memory = story.device.Allocate(4, "whose end waits for both streams").value();
      story.Write(*story.a, "abc");
      story.Write(*story.b, "xyz");
      ASSERT_TRUE(story.event->Synchronize().ok());
      ASSERT_EQ(story.diary, "");
      ASSERT_TRUE(story.b->Record(*story.event).ok());
      ASSERT_TRUE(story.a->Wait(*story.event).ok());
      ASSERT_TRUE(story.a->Synchronize().ok());
      seen.insert(story.diary);
    }
    ASSERT_EQ(seen.size(), 1) << seed;
  }
}

// ---------------------------------------------------------------- late and early

TEST(FakeDevice, DoesNothingThatNobodyWaitsForWithTheLatestSeed) {
  Story story(0);
  story.Write(*story.a, "ab");
  story.Write(*story.b, "xy");
  ASSERT_TRUE(story.b->Synchronize().ok());
  EXPECT_EQ(story.diary, "xy");
  ASSERT_TRUE(story.a->Record(*story.event).ok());
  story.Write(*story.a, 'c');
  ASSERT_TRUE(story.event->Synchronize().ok());
  EXPECT_EQ(story.diary, "xyab");
}

TEST(FakeDevice, DoesEverythingUnaskedWithTheEarliestSeed) {
  Story story(3);
  story.Write(*story.a, "ab");
  std::atomic<bool> done = false;
  ASSERT_TRUE(GiveToFakeStream(*story.a, "tell", [&] {
                done = true;
                done.notify_all();
              }).ok());
  done.wait(false);  // Nothing of the device is called.
  EXPECT_EQ(story.diary, "ab");
}

TEST(FakeDevice, HasDoneWhatAnEventIsAskedForAgainAndAgain) {
  Story story(0);
  story.Write(*story.a, 'a');
  ASSERT_TRUE(story.a->Record(*story.event).ok());
  while (!story.event->Done().value()) std::this_thread::yield();
  EXPECT_EQ(story.diary, "a");
}

TEST(FakeDevice, ReadsPinnedMemoryWhenTheCopyIsDone) {
  std::set<float> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    FakeDevice device({.seed = seed});
    const auto stream = device.CreateStream("copies").value();
    std::vector<float> value = {1};
    const auto host = Pinned(device, Bytes(value));
    const auto memory = device.Allocate(4, "test").value();
    std::atomic<bool> early = false;
    ASSERT_TRUE(stream->CopyToDevice(memory->data(), host->bytes()).ok());
    if (seed % 4 ==
        3) {  // Otherwise the copy and this thread would race, as they do in wrong code.
      ASSERT_TRUE(GiveToFakeStream(*stream, "tell", [&] {
                    early = true;
                    early.notify_all();
                  }).ok());
      early.wait(false);
    }
    if (seed % 4 == 0 || seed % 4 == 3) *reinterpret_cast<float*>(host->bytes().data()) = 2;
    ASSERT_TRUE(stream->CopyToHost(Bytes(value), memory->data()).ok());
    ASSERT_TRUE(stream->Synchronize().ok());
    seen.insert(value[0]);
  }
  EXPECT_THAT(seen, UnorderedElementsAre(1, 2));
}

TEST(FakeDevice, ReadsDeviceMemoryWhenTheCopyIsDone) {
  Story story(0);
  std::vector<float> value = {7};
  const auto host = Pinned(story.device, Bytes(value));
  const auto memory = story.device.Allocate(4, "test").value();
  ASSERT_TRUE(story.a->CopyToDevice(memory->data(), Bytes(value)).ok());
  ASSERT_TRUE(story.a->CopyToHost(host->bytes(), memory->data()).ok());
  ASSERT_TRUE(story.b->Zero(memory->data(), 4).ok());  // No event makes it wait for the copy.
  ASSERT_TRUE(story.b->Synchronize().ok());
  ASSERT_TRUE(story.a->Synchronize().ok());
  EXPECT_EQ(*reinterpret_cast<float*>(host->bytes().data()), 0);
}

TEST(FakeDevice, WaitsForCopiesFromAndToPageableMemory) {
  for (const bool can_pin : {false, true}) {
    FakeDevice device({.seed = 0, .can_pin = can_pin});
    const auto stream = device.CreateStream("copies").value();
    const auto memory = device.Allocate(8, "test").value();
    const auto host = device.AllocateHost(8, "test").value();
    EXPECT_EQ(host->pinned(), can_pin);
    std::vector<float> from = {1, 2}, to = {0, 0};
    ASSERT_TRUE(stream->CopyToDevice(memory->data(), Bytes(from)).ok());
    from = {3, 4};
    ASSERT_TRUE(stream->CopyToHost(Bytes(to), memory->data()).ok());
    EXPECT_THAT(to, ElementsAre(1, 2));
    ASSERT_TRUE(stream->CopyToHost(host->bytes(), memory->data()).ok());
    const float first = *reinterpret_cast<const float*>(host->bytes().data());
    if (can_pin) {
      EXPECT_TRUE(std::isnan(first));  // Not there yet.
    } else {
      EXPECT_EQ(first, 1);
    }
    ASSERT_TRUE(stream->Synchronize().ok());
  }
}

TEST(FakeDevice, PinsMemoryOfOthers) {
  FakeDevice device;
  const auto stream = device.CreateStream("copies").value();
  const auto memory = device.Allocate(8, "test").value();
  std::vector<float> to = {1, 2};
  const auto pinned = device.PinHost(Bytes(to), "gradients").value();
  EXPECT_EQ(pinned->bytes().data(), Bytes(to).data());
  ASSERT_TRUE(stream->CopyToHost(pinned->bytes().subspan(4), memory->data()).ok());
  EXPECT_THAT(to, ElementsAre(1, 2));
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_THAT(to, ElementsAre(1, 0));
}

TEST(FakeDevice, TellsTheTimeBetweenEvents) {
  Story story;
  const auto later = story.device.CreateEvent().value();
  ASSERT_TRUE(story.a->Record(*story.event).ok());
  std::chrono::duration<double> spent;
  ASSERT_TRUE(GiveToFakeStream(*story.a, "spin", [&] {
                const auto begin = std::chrono::steady_clock::now();
                while ((spent = std::chrono::steady_clock::now() - begin).count() < 0.001) {
                }
              }).ok());
  ASSERT_TRUE(story.a->Record(*later).ok());
  ASSERT_TRUE(later->Synchronize().ok());
  EXPECT_GE(later->SecondsSince(*story.event).value(), spent.count());
}

TEST(FakeDevice, TellsTheTimeOfItsClockAsMillisecondsInAFloat) {
  std::atomic<int64_t> now = 0;
  Story story({.clock = [&] { return std::chrono::nanoseconds(now.load()); }});
  const auto later = story.device.CreateEvent().value();
  ASSERT_TRUE(story.a->Record(*story.event).ok());
  ASSERT_TRUE(story.event->Synchronize().ok());
  now = 3'600'000'100'000;  // An hour and 100 us, which is 0.1 ms of 24 bits.
  ASSERT_TRUE(story.a->Record(*later).ok());
  ASSERT_TRUE(later->Synchronize().ok());
  EXPECT_EQ(later->SecondsSince(*story.event).value(), 3600);
  EXPECT_EQ(story.event->SecondsSince(*later).value(), 0);
}

// ---------------------------------------------------------------- memory

TEST(FakeDevice, CountsItsMemoryAndRefusesMoreThanItHas) {
  FakeDevice device({.memory_bytes = 1000});
  auto first = device.Allocate(600, "weights").value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first->data()) % 256, 0);
  EXPECT_EQ(device.allocated_bytes(), 600);
  const absl::Status refused = device.Allocate(401, "activations").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("activations: 401 bytes, of 1000 are 400 free"));
  const auto second = device.Allocate(400, "activations").value();
  first.reset();
  EXPECT_EQ(device.allocated_bytes(), 400);
  EXPECT_EQ(device.most_allocated_bytes(), 1000);
}

TEST(FakeDevice, AllocatesZeros) {
  FakeDevice device;
  const auto stream = device.CreateStream("copies").value();
  for (int round = 0; round < 3; ++round) {  // What was freed before is not seen again.
    std::vector<float> values(1000, 5);
    const auto memory = device.Allocate(4000, "test").value();
    ASSERT_TRUE(stream->CopyToHost(Bytes(values), memory->data()).ok());
    EXPECT_THAT(values, Each(0));
    values.assign(1000, 9);
    ASSERT_TRUE(stream->CopyToDevice(memory->data(), Bytes(values)).ok());
  }
}

TEST(FakeDevice, FinishesWorkBeforeItFreesMemory) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Story story(seed);
    auto memory = story.device.Allocate(4, "test").value();
    float* value = memory->as<float>();
    ASSERT_TRUE(GiveToFakeStream(*story.a, "write", [value] { *value = 1; }).ok());
    ASSERT_TRUE(GiveToFakeStream(*story.b, "write", [value] { *value = 2; }).ok());
    story.Write(*story.b, 'b');
    story.a.reset();  // Its work stays.
    memory.reset();
    EXPECT_EQ(story.diary, "b");
  }
}

TEST(FakeDevice, CopiesOfNothingAreNothing) {
  Story story;
  EXPECT_TRUE(story.a->CopyToHost({}, nullptr).ok());
  EXPECT_TRUE(story.a->CopyToDevice(nullptr, {}).ok());
  EXPECT_TRUE(story.a->CopyOnDevice(nullptr, nullptr, 0).ok());
  EXPECT_TRUE(story.a->Zero(nullptr, 0).ok());
  const auto memory = story.device.Allocate(0, "nothing").value();
  const auto host = story.device.AllocateHost(0, "nothing").value();
  EXPECT_TRUE(story.a->CopyToHost(host->bytes(), memory->data()).ok());
  EXPECT_TRUE(story.a->Synchronize().ok());
}

// ---------------------------------------------------------------- failures

TEST(FakeDevice, FailsTheOperationThatATestWants) {
  std::vector<std::pair<std::string, std::string>> asked;
  absl::Status next;
  Story story({.fail = [&](absl::string_view operation, absl::string_view what) {
    asked.emplace_back(operation, what);
    return next;
  }});
  next = absl::ResourceExhaustedError("none");
  EXPECT_EQ(story.device.Allocate(4, "weights").status(), next);
  EXPECT_EQ(story.device.AllocateHost(4, "staging").status(), next);
  EXPECT_EQ(story.device.PinHost({}, "gradients").status(), next);
  EXPECT_EQ(story.device.CreateStream("c").status(), next);
  EXPECT_EQ(story.device.CreateEvent().status(), next);
  EXPECT_EQ(story.a->Record(*story.event), next);
  EXPECT_EQ(story.a->Wait(*story.event), next);
  EXPECT_EQ(story.a->CopyToHost({}, nullptr), next);
  EXPECT_EQ(story.a->CopyToDevice(nullptr, {}), next);
  EXPECT_EQ(story.a->CopyOnDevice(nullptr, nullptr, 0), next);
  EXPECT_EQ(story.a->Zero(nullptr, 0), next);
  EXPECT_EQ(GiveToFakeStream(*story.a, "adam", [] { FAIL(); }), next);
  EXPECT_EQ(story.a->Synchronize(), next);
  EXPECT_EQ(story.event->Synchronize(), next);
  EXPECT_EQ(story.event->Done().status(), next);
  next = absl::OkStatus();
  EXPECT_TRUE(story.device.Allocate(4, "weights").ok());
  EXPECT_TRUE(story.a->Synchronize().ok());

  using Asked = std::pair<std::string, std::string>;
  EXPECT_THAT(
      asked,
      IsSupersetOf({Asked("allocate", "weights"), Asked("allocate host", "staging"),
                    Asked("pin", "gradients"), Asked("create stream", "c"),
                    Asked("create event", ""), Asked("record", "a"), Asked("wait", "a"),
                    Asked("copy to host", "a"), Asked("copy to device", "a"),
                    Asked("copy on device", "a"), Asked("zero", "a"), Asked("kernel", "adam"),
                    Asked("synchronize", "a"), Asked("synchronize", ""), Asked("query", "")}));
}

TEST(FakeDevice, ALostDeviceDoesNoMoreWorkAndSaysSoEverywhere) {
  const absl::Status lost = absl::UnavailableError("GPU 0 fell off the bus");
  bool lose = false;
  Story story({.seed = 0, .fail = [&](absl::string_view operation, absl::string_view) {
                 return lose && operation == "zero" ? lost : absl::OkStatus();
               }});
  auto memory = story.device.Allocate(4, "weights").value();
  auto host = story.device.AllocateHost(4, "staging").value();
  story.Write(*story.a, 'a');
  ASSERT_TRUE(story.a->Synchronize().ok());
  story.Write(*story.a, 'b');
  ASSERT_TRUE(story.a->CopyToHost(host->bytes(), memory->data()).ok());
  ASSERT_TRUE(story.a->Record(*story.event).ok());
  lose = true;
  EXPECT_EQ(story.b->Zero(memory->data(), 4), lost);
  EXPECT_EQ(story.a->Synchronize(), lost);
  EXPECT_EQ(story.event->Synchronize(), lost);
  EXPECT_EQ(story.event->Done().status(), lost);
  EXPECT_EQ(story.device.Allocate(4, "weights").status(), lost);
  EXPECT_EQ(story.a->Record(*story.event), lost);
  EXPECT_EQ(GiveToFakeStream(*story.b, "kernel", [] { FAIL(); }), lost);
  host.reset();  // No copy to it is left.
  memory.reset();
  EXPECT_EQ(story.diary, "a");
}

TEST(FakeDevice, LosingItEndsAWaitInAnotherThread) {
  const absl::Status lost = absl::UnavailableError("GPU 0 fell off the bus");
  Story story({.seed = 0, .fail = [&](absl::string_view operation, absl::string_view) {
                 return operation == "zero" ? lost : absl::OkStatus();
               }});
  std::atomic<bool> begun = false, go_on = false;
  ASSERT_TRUE(GiveToFakeStream(*story.a, "blocked", [&] {
                begun = true;
                begun.notify_all();
                go_on.wait(false);
              }).ok());
  story.Write(*story.a, 'a');
  absl::Status waited;
  std::thread waiter([&] { waited = story.a->Synchronize(); });
  begun.wait(false);
  EXPECT_EQ(story.b->Zero(nullptr, 0), lost);
  go_on = true;
  go_on.notify_all();
  waiter.join();
  EXPECT_EQ(waited, lost);
  EXPECT_EQ(story.diary, "");
}

// ---------------------------------------------------------------- broken rules

class FakeDeviceDeathTest : public testing::Test {
 protected:
  FakeDeviceDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(FakeDeviceDeathTest, AbortsWhereMemoryOrStreamsAreLeft) {
  std::unique_ptr<DeviceMemory> memory;
  std::unique_ptr<DeviceStream> stream;
  EXPECT_DEATH(memory = FakeDevice().Allocate(4, "weights").value(), "1 pieces of device memory");
  EXPECT_DEATH(stream = FakeDevice().CreateStream("a").value(), "1 streams are left");
}

TEST_F(FakeDeviceDeathTest, AbortsWherePinnedMemoryGoesBeforeTheCopyIsDone) {
  Story story(0);
  const auto memory = story.device.Allocate(4, "weights").value();
  auto host = story.device.AllocateHost(4, "staging").value();
  ASSERT_TRUE(story.a->CopyToHost(host->bytes(), memory->data()).ok());
  EXPECT_DEATH(host.reset(), "host memory for staging goes while stream a still has a copy");
  ASSERT_TRUE(story.a->Synchronize().ok());
}

TEST_F(FakeDeviceDeathTest, AbortsWhereACopyLeavesTheDevicesMemory) {
  Story story;
  const auto memory = story.device.Allocate(8, "weights").value();
  std::vector<float> values(3);
  EXPECT_DEATH((void)story.a->CopyToHost(Bytes(values), memory->data()), "12 bytes are not within");
  EXPECT_DEATH((void)story.a->CopyToDevice(values.data(), absl::MakeSpan(memory->data(), 8)),
               "not within memory of");
  EXPECT_DEATH((void)story.a->CopyToDevice(memory->data(), absl::MakeSpan(memory->data(), 8)),
               "the host's side is memory of GPU 0");
  EXPECT_DEATH((void)story.a->Zero(memory->data() + 4, 8), "8 bytes are not within");
}

TEST_F(FakeDeviceDeathTest, AbortsWhereTwoThreadsUseAStreamAtOnce) {
  EXPECT_DEATH(
      {
        Story story(0);
        std::atomic<bool> begun = false;
        (void)GiveToFakeStream(*story.a, "blocked", [&] {
          begun = true;
          begun.notify_all();
          while (true) std::this_thread::yield();
        });
        std::thread waiter([&] { (void)story.a->Synchronize(); });
        begun.wait(false);
        (void)story.a->Record(*story.event);
      },
      "stream a is used by two threads at once");
}

#if BALLAST_ASAN
TEST_F(FakeDeviceDeathTest, AddressSanitizerSeesTheHostReadDeviceMemory) {
  FakeDevice device;
  const auto memory = device.Allocate(8, "weights").value();
  EXPECT_DEATH(EXPECT_EQ(*memory->as<float>(), 0), "use-after-poison");
}
#endif

}  // namespace
}  // namespace ballast::worker
