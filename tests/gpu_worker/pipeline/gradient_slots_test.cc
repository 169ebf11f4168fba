#include "gpu_worker/pipeline/gradient_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/pipeline/scripted_passes.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

class GradientSlotsTest : public testing::Test {
 protected:
  std::unique_ptr<GradientSlots> Create(const GradientSlotsOptions& options) {
    return GradientSlots::Create(device_, job_.layout, job_.spec.groups, options).value();
  }
  size_t SizeOf(int chunk) const { return job_.layout.chunks()[chunk].elements * sizeof(uint16_t); }
  absl::Span<const int> chunks() const { return job_.layout.chunks_of_rank(0); }
  // The optimizer's memory for even chunks.
  absl::Span<std::byte> Own(int chunk) {
    if (chunk % 2 != 0) return {};
    memory_[chunk].resize(SizeOf(chunk));
    return absl::MakeSpan(memory_[chunk]);
  }

  const TrainingJob job_ = ScriptedJob(2, DType::kBFloat16, 1);
  std::map<int, std::vector<std::byte>> memory_;
  FakeDevice device_;
};

TEST_F(GradientSlotsTest, AreSlotsOfTheChunksSizeWhileThereAreSome) {
  const auto places = Create({.staging_slots = 2, .timeout = absl::Milliseconds(20)});
  GradientSlots::Place first = places->Take(chunks()[0], 0).value();
  GradientSlots::Place second = places->Take(chunks()[1], 0).value();
  EXPECT_EQ(first.bytes.size(), SizeOf(chunks()[0]));
  EXPECT_EQ(second.bytes.size(), SizeOf(chunks()[1]));
  EXPECT_NE(first.bytes.data(), second.bytes.data());
  const absl::Status full = places->Take(chunks()[2], 3).status();
  EXPECT_TRUE(Refused(full, absl::StatusCode::kDeadlineExceeded));
  EXPECT_GE(places->waited_seconds(), 0.02);
  first.released();
  EXPECT_TRUE(places->Take(chunks()[2], 3).ok());
}

TEST_F(GradientSlotsTest, OfAShortChunkAreAsShort) {
  const TrainingJob job =
      MakeTrainingJob(ScriptedParameters(), {.bucket_elements = 768, .chunk_elements = 512})
          .value();
  const absl::Span<const Chunk> chunks = job.layout.chunks();
  ASSERT_EQ(chunks[0].elements, 512);
  ASSERT_EQ(chunks[1].elements, 256);
  const auto places =
      GradientSlots::Create(device_, job.layout, job.spec.groups, {.staging_slots = 2}).value();
  EXPECT_EQ(places->Take(0, 0).value().bytes.size(), 1024);
  EXPECT_EQ(places->Take(1, 0).value().bytes.size(), 512);
}

TEST_F(GradientSlotsTest, AreTheOptimizersWhereItHasSomeOneMicroStepAtATime) {
  const auto places = Create({.staging_slots = 1, .timeout = absl::Milliseconds(20)});
  ASSERT_TRUE(places->Use([this](int chunk) { return Own(chunk); }).ok());
  const int own = chunks()[0] % 2 == 0 ? chunks()[0] : chunks()[1];
  GradientSlots::Place place = places->Take(own, 0).value();
  EXPECT_EQ(place.bytes.data(), memory_[own].data());
  EXPECT_EQ(place.bytes.size(), SizeOf(own));
  const absl::Status taken = places->Take(own, 1).status();
  EXPECT_TRUE(Refused(taken, absl::StatusCode::kDeadlineExceeded));
  place.released();
  EXPECT_TRUE(places->Take(own, 1).ok());
}

TEST_F(GradientSlotsTest, ThatComeFreeWakeWhoeverWaits) {
  for (const bool own : {false, true}) {
    const auto places = Create({.staging_slots = 1, .timeout = absl::Minutes(1)});
    if (own) ASSERT_TRUE(places->Use([this](int chunk) { return Own(chunk); }).ok());
    const int chunk = chunks()[0] % 2 == 0 ? chunks()[0] : chunks()[1];
    GradientSlots::Place place = places->Take(chunk, 0).value();
    std::thread waiter([&] { EXPECT_TRUE(places->Take(chunk, 1).ok()); });
    place.released();
    waiter.join();
  }
}

TEST_F(GradientSlotsTest, OfABucketAreAwaitedTogether) {
  const auto places = Create({.staging_slots = 8, .timeout = absl::Minutes(1)});
  const auto own = [this](int chunk) {
    memory_[chunk].resize(SizeOf(chunk));
    return absl::MakeSpan(memory_[chunk]);
  };
  ASSERT_TRUE(places->Use(own).ok());
  ASSERT_GE(chunks().size(), 3);
  for (const bool in_order : {true, false}) {
    std::vector<GradientSlots::Place> taken;
    for (const int chunk : chunks()) taken.push_back(places->Take(chunk, 0).value());
    if (!in_order) std::reverse(taken.begin(), taken.end());
    std::atomic<size_t> released = 0;
    std::atomic<bool> awaited = false;
    std::thread waiter([&] {
      EXPECT_TRUE(places->AwaitFree(chunks()));
      EXPECT_EQ(released, taken.size());
      awaited = true;
    });
    for (const GradientSlots::Place& place : taken) {
      ++released;
      place.released();
      // Time for a wait that is for this one alone to end; it shows, or passes unnoticed.
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
      while (released == 1 && !awaited && std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
      }
    }
    waiter.join();
    EXPECT_TRUE(places->AwaitFree(chunks()));  // They are.
  }
  const GradientSlots::Place place = places->Take(chunks()[1], 0).value();
  std::thread waiter([&] { EXPECT_FALSE(places->AwaitFree(chunks())); });
  places->Cancel();
  waiter.join();
  place.released();
}

TEST_F(GradientSlotsTest, OfTheRingAreNotAwaitedTogether) {
  const auto places = Create({.staging_slots = 1, .timeout = absl::Minutes(1)});
  const GradientSlots::Place place = places->Take(chunks()[0], 0).value();
  EXPECT_FALSE(places->IsFree(chunks()[0]));
  EXPECT_FALSE(places->AwaitFree(chunks()));  // It would have to be handed over first.
  place.released();
  EXPECT_TRUE(places->IsFree(chunks()[0]));
}

TEST_F(GradientSlotsTest, OnceCancelledNobodyWaits) {
  for (const bool own : {false, true}) {
    const auto places = Create({.staging_slots = 1, .timeout = absl::Minutes(1)});
    if (own) ASSERT_TRUE(places->Use([this](int chunk) { return Own(chunk); }).ok());
    const int chunk = chunks()[0] % 2 == 0 ? chunks()[0] : chunks()[1];
    const GradientSlots::Place place = places->Take(chunk, 0).value();
    std::thread waiter(
        [&] { EXPECT_EQ(places->Take(chunk, 1).status().code(), absl::StatusCode::kCancelled); });
    places->Cancel();
    waiter.join();
    EXPECT_EQ(places->Take(chunk, 1).status().code(), absl::StatusCode::kCancelled);
    place.released();
  }
}

TEST_F(GradientSlotsTest, OnTheDeviceEachChunkOfTheRankHasItsOwn) {
  const auto places = Create({.rank = 1, .on_device = true});
  size_t bytes = 0;
  std::byte* end = nullptr;
  for (const int chunk : job_.layout.chunks_of_rank(1)) {
    const GradientSlots::Place place = places->Take(chunk, 0).value();
    if (end != nullptr) EXPECT_EQ(place.bytes.data(), end);
    end = place.bytes.data() + place.bytes.size();
    bytes += place.bytes.size();
  }
  EXPECT_EQ(device_.allocated_bytes(), bytes);
}

TEST_F(GradientSlotsTest, MayBeReleasedWhenTheyAreGone) {
  auto places = Create({.staging_slots = 1});
  const GradientSlots::Place place = places->Take(chunks()[0], 0).value();
  places.reset();
  place.bytes[0] = std::byte{1};
  place.released();
}

}  // namespace
}  // namespace ballast::worker
