#include "gpu_worker/pipeline/staging_ring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/gpu_emulator/fake_device.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;

// A ring, and threads that take from it one after another.
class Waiters {
 public:
  explicit Waiters(int slots) : ring_(StagingRing::Create(device_, slots, 100, kLong).value()) {}
  ~Waiters() {
    for (std::thread& thread : threads_) thread.join();
  }
  StagingRing& ring() { return *ring_; }

  // The next thread, which waits for a slot before this returns and gives it back once it has it.
  void Start(int number) {
    const int waiting = ring_->waiting();
    threads_.emplace_back([this, number] {
      const absl::StatusOr<StagingRing::Slot> slot = ring_->Take();
      MutexLock lock(mutex_);
      outcomes_.push_back({number, slot.status().code()});
    });
    while (ring_->waiting() == waiting) std::this_thread::yield();
  }
  // Once all threads are through: in which order they were.
  std::vector<int> Served() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    MutexLock lock(mutex_);
    std::vector<int> numbers;
    for (const auto& [number, code] : outcomes_) {
      if (code == absl::StatusCode::kOk) numbers.push_back(number);
    }
    return numbers;
  }

 private:
  static constexpr absl::Duration kLong = absl::Minutes(5);
  FakeDevice device_;
  std::unique_ptr<StagingRing> ring_;
  Mutex mutex_;
  std::vector<std::pair<int, absl::StatusCode>> outcomes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

TEST(StagingRing, GivesEachSlotMemoryOfItsOwn) {
  FakeDevice device;
  const auto ring = StagingRing::Create(device, 4, 5000, absl::ZeroDuration()).value();
  EXPECT_EQ(ring->slots(), 4);
  EXPECT_TRUE(ring->pinned());
  std::vector<StagingRing::Slot> slots;
  std::set<const std::byte*> begins;
  for (int i = 0; i < 4; ++i) {
    slots.push_back(ring->Take().value());
    const absl::Span<std::byte> bytes = slots.back().bytes();
    ASSERT_EQ(bytes.size(), 5000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % 4096, 0);
    std::fill(bytes.begin(), bytes.end(), std::byte(i));
    begins.insert(bytes.data());
  }
  EXPECT_EQ(begins.size(), 4);
  for (int i = 0; i < 4; ++i) {
    const absl::Span<std::byte> bytes = slots[i].bytes();
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), std::byte(i)), 5000) << i;
  }
}

TEST(StagingRing, HasNoMoreThanItsSlotsAndSaysWhoHasThem) {
  FakeDevice device;
  const auto ring = StagingRing::Create(device, 2, 64, absl::Milliseconds(20)).value();
  std::optional<StagingRing::Slot> first = ring->Take().value();
  const StagingRing::Slot second = ring->Take().value();
  const absl::Status refused = ring->Take().status();
  EXPECT_TRUE(Refused(refused, absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(ring->waiting(), 0);
  first.reset();
  EXPECT_TRUE(ring->Take().ok());
}

TEST(StagingRing, TakesASlotBackHoweverItGoes) {
  FakeDevice device;
  const auto ring = StagingRing::Create(device, 2, 64, absl::ZeroDuration()).value();
  StagingRing::Slot a = ring->Take().value();
  StagingRing::Slot b = ring->Take().value();
  const std::byte* const first = a.bytes().data();
  b = std::move(a);  // What b had goes back; a has nothing.
  EXPECT_EQ(b.bytes().data(), first);
  EXPECT_TRUE(a.bytes().empty());  // NOLINT(bugprone-use-after-move)
  EXPECT_NE(ring->Take().value().bytes().data(), first);
  EXPECT_NE(ring->Take().value().bytes().data(), first);
  b = StagingRing::Slot();
  const StagingRing::Slot c = ring->Take().value();
  EXPECT_TRUE(ring->Take().ok());
}

TEST(StagingRing, ServesWaitersInTheOrderOfTheirCalls) {
  for (int round = 0; round < 20; ++round) {
    Waiters waiters(1);
    std::optional<StagingRing::Slot> slot = waiters.ring().Take().value();
    for (int number = 0; number < 5; ++number) waiters.Start(number);
    EXPECT_EQ(waiters.ring().waiting(), 5);
    slot.reset();
    ASSERT_THAT(waiters.Served(), ElementsAre(0, 1, 2, 3, 4));
  }
}

TEST(StagingRing, AWaiterWhoseTimeIsOverHoldsUpNobody) {
  FakeDevice device;
  const auto ring = StagingRing::Create(device, 1, 64, absl::Milliseconds(100)).value();
  std::optional<StagingRing::Slot> slot = ring->Take().value();
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back(
        [&] { EXPECT_EQ(ring->Take().status().code(), absl::StatusCode::kDeadlineExceeded); });
  }
  for (std::thread& thread : threads) thread.join();
  slot.reset();
  EXPECT_TRUE(ring->Take().ok());
}

TEST(StagingRing, CancelEndsEveryWaitAndLaterCalls) {
  Waiters waiters(1);
  const StagingRing::Slot slot = waiters.ring().Take().value();
  for (int number = 0; number < 3; ++number) waiters.Start(number);
  waiters.ring().Cancel();
  EXPECT_THAT(waiters.Served(), ElementsAre());
  EXPECT_EQ(waiters.ring().Take().status().code(), absl::StatusCode::kCancelled);
}

TEST(StagingRing, GoesOnWithPageableMemoryWherePinningFails) {
  FakeDevice device({.can_pin = false});
  const auto ring = StagingRing::Create(device, 2, 64, absl::ZeroDuration()).value();
  EXPECT_FALSE(ring->pinned());
  EXPECT_EQ(ring->Take().value().bytes().size(), 64);
}

TEST(StagingRing, RefusesMoreThanTheHostHas) {
  FakeDevice device(
      {.fail = [](absl::string_view operation, absl::string_view what) -> absl::Status {
        if (operation != "allocate host") return absl::OkStatus();
        return absl::ResourceExhaustedError(what);
      }});
  const absl::Status refused =
      StagingRing::Create(device, 32, 1 << 20, absl::ZeroDuration()).status();
  EXPECT_TRUE(Refused(refused, absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(StagingRing::Create(device, 32, SIZE_MAX / 16, absl::ZeroDuration()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(StagingRing, BoundsWhatManyThreadsHaveAtOnce) {
  constexpr int kSlots = 3;
  FakeDevice device;
  const auto ring = StagingRing::Create(device, kSlots, 64, absl::Minutes(5)).value();
  std::atomic<int> taken = 0, most = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const StagingRing::Slot slot = ring->Take().value();
        const int now = ++taken;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        slot.bytes()[0] = std::byte(i);
        --taken;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, kSlots);
}

}  // namespace
}  // namespace ballast::worker
