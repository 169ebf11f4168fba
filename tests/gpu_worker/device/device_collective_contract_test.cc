// What every DeviceCollective promises, in each of DeviceWorlds().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu_worker/base/random.h"
#include "tests/gpu_worker/device/device_worlds.h"

namespace ballast::worker {
namespace {

using testing::Each;

class DeviceCollectiveContract : public testing::TestWithParam<DeviceWorld> {
 protected:
  void SetUp() override {
    if (!GetParam().missing.empty()) GTEST_SKIP() << GetParam().missing;
  }
  int world_size() const { return GetParam().world_size; }
  int ranks_sum() const { return world_size() * (world_size() + 1) / 2; }
  void Run(const std::function<void(const DeviceRank&)>& body) { GetParam().run(body); }
};

INSTANTIATE_TEST_SUITE_P(Worlds, DeviceCollectiveContract, testing::ValuesIn(DeviceWorlds()),
                         [](const auto& info) { return info.param.name; });

// Elements on the device. Copies are given to a stream, and only Read waits for them.
template <typename T>
class OnDevice {
 public:
  OnDevice(Device& device, size_t elements)
      : memory_(device.Allocate(elements * sizeof(T), "test").value()),
        host_(device.AllocateHost(elements * sizeof(T), "test").value()) {}
  T* data() const { return memory_->as<T>(); }

  // Once for an object: the host's side is in use from then on.
  void Write(DeviceStream& stream, const std::vector<T>& values) {
    if (!values.empty()) {
      std::memcpy(host_->bytes().data(), values.data(), host_->bytes().size());
    }
    ASSERT_EQ(stream.CopyToDevice(memory_->data(), host_->bytes()), absl::OkStatus());
  }
  std::vector<T> Read(DeviceStream& stream) {
    std::vector<T> values(memory_->size_bytes() / sizeof(T));
    EXPECT_EQ(
        stream.CopyToHost({reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)},
                          memory_->data()),
        absl::OkStatus());
    EXPECT_EQ(stream.Synchronize(), absl::OkStatus());
    return values;
  }

 private:
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<HostMemory> host_;
};

std::vector<float> WholeNumbers(int64_t elements, int rank) {
  std::vector<float> values(elements);
  for (int64_t i = 0; i < elements; ++i) values[i] = (i % 1000) * (rank + 1);
  return values;
}

TEST_P(DeviceCollectiveContract, KnowsItsPlace) {
  std::mutex mutex;
  std::vector<int> ranks;
  Run([&](const DeviceRank& rank) {
    EXPECT_EQ(rank.collective.world_size(), world_size());
    EXPECT_EQ(rank.collective.Finish(), absl::OkStatus());
    const std::lock_guard lock(mutex);
    ranks.push_back(rank.collective.rank());
  });
  std::sort(ranks.begin(), ranks.end());
  for (int rank = 0; rank < world_size(); ++rank) EXPECT_EQ(ranks[rank], rank);
}

TEST_P(DeviceCollectiveContract, ReduceScatterSumsWholeNumbersExactly) {
  Run([&](const DeviceRank& rank) {
    const auto stream = rank.device.CreateStream("communicate").value();
    for (const int64_t elements : {1, 100003, 0, 7, 256}) {
      const int64_t begin = rank.collective.rank() * elements;
      const std::vector<float> values =
          WholeNumbers(elements * world_size(), rank.collective.rank());
      OnDevice<float> input(rank.device, values.size());
      OnDevice<float> shard(rank.device, elements);
      input.Write(*stream, values);
      ASSERT_EQ(rank.collective.ReduceScatterSum(*stream, input.data(), shard.data(), elements, {}),
                absl::OkStatus());
      const std::vector<float> sums = shard.Read(*stream);
      for (int64_t i = 0; i < elements; ++i) {
        ASSERT_EQ(sums[i], ((begin + i) % 1000) * ranks_sum()) << i;
      }
      ASSERT_EQ(input.Read(*stream), values);
    }
  });
}

TEST_P(DeviceCollectiveContract, ReduceScatterInPlaceWritesNothingElse) {
  Run([&](const DeviceRank& rank) {
    const auto stream = rank.device.CreateStream("communicate").value();
    for (const int64_t elements : {1, 5, 4099}) {
      const int64_t begin = rank.collective.rank() * elements;
      const std::vector<float> values =
          WholeNumbers(elements * world_size(), rank.collective.rank());
      OnDevice<float> input(rank.device, values.size());
      input.Write(*stream, values);
      ASSERT_EQ(rank.collective.ReduceScatterSum(*stream, input.data(), input.data() + begin,
                                                 elements, {}),
                absl::OkStatus());
      const std::vector<float> after = input.Read(*stream);
      for (int64_t i = 0; i < elements * world_size(); ++i) {
        const bool mine = i >= begin && i < begin + elements;
        ASSERT_EQ(after[i], mine ? (i % 1000) * ranks_sum() : values[i]) << i;
      }
    }
  });
}

TEST_P(DeviceCollectiveContract, RepeatedRunsGiveTheSameBits) {
  constexpr int kElements = 1001;
  std::vector<std::vector<float>> first(world_size());
  for (int run = 0; run < 3; ++run) {
    Run([&](const DeviceRank& rank) {
      const int self = rank.collective.rank();
      const auto stream = rank.device.CreateStream("communicate").value();
      std::vector<float> values(kElements * world_size());
      for (size_t i = 0; i < values.size(); ++i) values[i] = RandomNormal(1, self, i);
      OnDevice<float> input(rank.device, values.size());
      OnDevice<float> shard(rank.device, kElements);
      input.Write(*stream, values);
      ASSERT_EQ(
          rank.collective.ReduceScatterSum(*stream, input.data(), shard.data(), kElements, {}),
          absl::OkStatus());
      const std::vector<float> sums = shard.Read(*stream);
      if (run == 0) first[self] = sums;
      EXPECT_EQ(std::memcmp(sums.data(), first[self].data(), sizeof(float) * kElements), 0);
    });
  }
}

TEST_P(DeviceCollectiveContract, AllGatherBringsEveryShardToItsPlace) {
  Run([&](const DeviceRank& rank) {
    const auto stream = rank.device.CreateStream("communicate").value();
    for (const size_t bytes : {1, 1000002, 0, 6, 4096}) {
      for (const bool in_place : {false, true}) {
        const std::vector<uint8_t> values(bytes, rank.collective.rank() + 1);
        OnDevice<uint8_t> all(rank.device, bytes * world_size());
        OnDevice<uint8_t> shard(rank.device, bytes);
        shard.Write(*stream, values);
        uint8_t* const mine = all.data() + rank.collective.rank() * bytes;
        if (in_place) {
          ASSERT_EQ(stream->CopyOnDevice(mine, shard.data(), bytes), absl::OkStatus());
        }
        ASSERT_EQ(rank.collective.AllGather(
                      *stream, reinterpret_cast<std::byte*>(in_place ? mine : shard.data()),
                      reinterpret_cast<std::byte*>(all.data()), bytes, {}),
                  absl::OkStatus());
        const std::vector<uint8_t> gathered = all.Read(*stream);
        for (int peer = 0; peer < world_size(); ++peer) {
          const auto begin = gathered.begin() + peer * bytes;
          ASSERT_EQ(std::count(begin, begin + bytes, peer + 1), bytes) << peer;
        }
      }
    }
  });
}

// A bucket's way: reduced on one stream, gathered on another, used on a third, ordered by events
// alone, while other buckets follow in the same memory of the collective.
TEST_P(DeviceCollectiveContract, IsDoneInTheOrderOfItsStreams) {
  constexpr int kBuckets = 12;
  Run([&](const DeviceRank& rank) {
    const int self = rank.collective.rank();
    const auto compute = rank.device.CreateStream("compute").value();
    const auto reduce = rank.device.CreateStream("reduce").value();
    const auto gather = rank.device.CreateStream("gather").value();
    std::vector<std::unique_ptr<DeviceEvent>> events;
    const auto order = [&](DeviceStream& before, DeviceStream& after) {
      events.push_back(rank.device.CreateEvent().value());
      EXPECT_EQ(before.Record(*events.back()), absl::OkStatus());
      EXPECT_EQ(after.Wait(*events.back()), absl::OkStatus());
    };
    std::vector<OnDevice<float>> buckets;
    buckets.reserve(kBuckets);
    for (int b = 0; b < kBuckets; ++b) {
      const int64_t elements = 1 + 37 * ((5 * b) % kBuckets);
      buckets.emplace_back(rank.device, elements * world_size());
      float* const data = buckets.back().data();
      buckets.back().Write(*compute, std::vector<float>(elements * world_size(), b + self));
      order(*compute, *reduce);
      ASSERT_EQ(rank.collective.ReduceScatterSum(*reduce, data, data + self * elements, elements,
                                                 {.step = 1, .bucket = b}),
                absl::OkStatus());
      order(*reduce, *gather);
      ASSERT_EQ(rank.collective.AllGather(
                    *gather, reinterpret_cast<const std::byte*>(data + self * elements),
                    reinterpret_cast<std::byte*>(data), elements * sizeof(float),
                    {.step = 1, .bucket = b}),
                absl::OkStatus());
    }
    order(*gather, *compute);
    for (int b = 0; b < kBuckets; ++b) {
      const float sum = b * world_size() + world_size() * (world_size() - 1) / 2;
      EXPECT_THAT(buckets[b].Read(*compute), Each(sum)) << b;
    }
  });
}

TEST_P(DeviceCollectiveContract, FinishWaitsForCallsOnAllStreams) {
  Run([&](const DeviceRank& rank) {
    const int self = rank.collective.rank();
    const auto first = rank.device.CreateStream("first").value();
    const auto second = rank.device.CreateStream("second").value();
    const auto reader = rank.device.CreateStream("reader").value();  // Ordered after nothing.
    OnDevice<float> input(rank.device, 3 * world_size());
    OnDevice<float> shard(rank.device, 3);
    OnDevice<uint8_t> all(rank.device, 4 * world_size());
    input.Write(*first, std::vector<float>(3 * world_size(), self + 1));
    ASSERT_EQ(rank.collective.ReduceScatterSum(*first, input.data(), shard.data(), 3, {}),
              absl::OkStatus());
    OnDevice<uint8_t> mine(rank.device, 4);
    mine.Write(*second, std::vector<uint8_t>(4, 9));
    ASSERT_EQ(rank.collective.AllGather(*second, reinterpret_cast<const std::byte*>(mine.data()),
                                        reinterpret_cast<std::byte*>(all.data()), 4, {}),
              absl::OkStatus());
    ASSERT_EQ(rank.collective.Finish(), absl::OkStatus());
    EXPECT_THAT(shard.Read(*reader), Each(ranks_sum()));
    EXPECT_THAT(all.Read(*reader), Each(9));
  });
}

}  // namespace
}  // namespace ballast::worker
