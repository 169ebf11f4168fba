// What every Collective promises, run on each implementation and several world sizes.
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/hash_store.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>

#include "gpu_worker/base/random.h"
#include "gpu_worker/collective/collective.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/temp_path.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::Each;
using testing::HasSubstr;

// As ballast-worker does: writing to a peer that is gone is to be an error.
[[maybe_unused]] const auto kIgnored = signal(SIGPIPE, SIG_IGN);

class CollectiveContract : public testing::TestWithParam<std::tuple<Backend, int>> {
 protected:
  int world_size() const { return std::get<1>(GetParam()); }
  void Run(const std::function<void(Collective&)>& body) {
    RunRanks(std::get<0>(GetParam()), world_size(), std::chrono::seconds(30), body);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Worlds, CollectiveContract,
    testing::Values(std::tuple(Backend::kSingle, 1), std::tuple(Backend::kGloo, 1),
                    std::tuple(Backend::kGloo, 2), std::tuple(Backend::kGloo, 3),
                    std::tuple(Backend::kGloo, 4)),
    [](const auto& info) {
      return (std::get<0>(info.param) == Backend::kSingle ? "Single" : "Gloo") +
             std::to_string(std::get<1>(info.param));
    });

TEST_P(CollectiveContract, KnowsItsPlace) {
  std::mutex mutex;
  std::vector<int> ranks;
  Run([&](Collective& collective) {
    EXPECT_EQ(collective.world_size(), world_size());
    const std::lock_guard lock(mutex);
    ranks.push_back(collective.rank());
  });
  std::sort(ranks.begin(), ranks.end());
  for (int rank = 0; rank < world_size(); ++rank) EXPECT_EQ(ranks[rank], rank);
}

TEST_P(CollectiveContract, ReduceScatterSumsWholeNumbersExactly) {
  Run([&](Collective& collective) {
    for (const int elements : {0, 1, 7, 256, 100003}) {
      std::vector<float> input(elements * world_size());
      for (size_t i = 0; i < input.size(); ++i) input[i] = (i % 1000) * (collective.rank() + 1);
      const std::vector<float> before = input;
      std::vector<float> shard(elements, -1.0f);
      ASSERT_EQ(collective.ReduceScatterSum(input, absl::MakeSpan(shard)), absl::OkStatus());
      const int ranks_sum = world_size() * (world_size() + 1) / 2;
      for (int i = 0; i < elements; ++i) {
        const int64_t at = static_cast<int64_t>(collective.rank()) * elements + i;
        ASSERT_EQ(shard[i], (at % 1000) * ranks_sum) << i;
      }
      EXPECT_EQ(input, before);
    }
  });
}

TEST_P(CollectiveContract, SumsAreInOrderOfRank) {
  // In fp32, 2^24 + 1 - 2^24 is 0 in this order and 1 in others.
  const std::vector<float> of_rank = {16777216.0f, 1.0f, -16777216.0f, 0.5f};
  float expected = of_rank[0];
  for (int rank = 1; rank < world_size(); ++rank) expected += of_rank[rank];
  Run([&](Collective& collective) {
    const std::vector<float> input(3 * world_size(), of_rank[collective.rank()]);
    std::vector<float> shard(3);
    ASSERT_EQ(collective.ReduceScatterSum(input, absl::MakeSpan(shard)), absl::OkStatus());
    EXPECT_THAT(shard, Each(expected));
  });
}

TEST_P(CollectiveContract, RepeatedRunsGiveTheSameBits) {
  constexpr int kElements = 1001;
  std::vector<std::vector<float>> first(world_size());
  for (int run = 0; run < 3; ++run) {
    Run([&](Collective& collective) {
      std::vector<float> input(kElements * world_size());
      for (size_t i = 0; i < input.size(); ++i) input[i] = RandomNormal(1, collective.rank(), i);
      std::vector<float> shard(kElements);
      ASSERT_EQ(collective.ReduceScatterSum(input, absl::MakeSpan(shard)), absl::OkStatus());
      if (run == 0) first[collective.rank()] = shard;
      EXPECT_EQ(std::memcmp(shard.data(), first[collective.rank()].data(), 4 * kElements), 0);
    });
  }
}

TEST_P(CollectiveContract, AllGatherBringsEveryShardToItsPlace) {
  Run([&](Collective& collective) {
    for (const size_t bytes : {0, 1, 3, 4096, 1000001}) {
      for (const bool in_place : {false, true}) {
        std::vector<std::byte> all(bytes * world_size());
        std::vector<std::byte> shard(bytes, std::byte(collective.rank() + 1));
        const auto mine = absl::MakeSpan(all).subspan(collective.rank() * bytes, bytes);
        if (in_place) std::copy(shard.begin(), shard.end(), mine.begin());
        ASSERT_TRUE(collective
                        .AllGather(in_place ? absl::Span<const std::byte>(mine)
                                            : absl::MakeConstSpan(shard),
                                   absl::MakeSpan(all))
                        .ok());
        for (int rank = 0; rank < world_size(); ++rank) {
          const auto begin = all.begin() + rank * bytes;
          EXPECT_EQ(std::count(begin, begin + bytes, std::byte(rank + 1)), bytes);
        }
      }
    }
  });
}

TEST_P(CollectiveContract, AllReduceGivesEveryRankTheSameSum) {
  Run([&](Collective& collective) {
    std::vector<double> values = {1.0 + collective.rank(), 0.1 * collective.rank()};
    ASSERT_TRUE(collective.AllReduceSum(absl::MakeSpan(values)).ok());
    double expected = 0;
    for (int rank = 0; rank < world_size(); ++rank) expected += 0.1 * rank;
    EXPECT_EQ(values[0], world_size() * (world_size() + 1) / 2.0);
    EXPECT_EQ(values[1], expected);
    EXPECT_TRUE(collective.AllReduceSum({}).ok());
  });
}

TEST_P(CollectiveContract, BroadcastBringsRankZerosBytes) {
  Run([&](Collective& collective) {
    for (const size_t bytes : {0, 1, 70001}) {
      std::vector<std::byte> data(bytes, std::byte(collective.rank() + 5));
      ASSERT_TRUE(collective.Broadcast(absl::MakeSpan(data)).ok());
      EXPECT_THAT(data, Each(std::byte(5)));
    }
  });
}

TEST_P(CollectiveContract, NobodyPassesABarrierBeforeAllHaveCome) {
  std::atomic<int> arrived = 0;
  Run([&](Collective& collective) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      ASSERT_TRUE(collective.Barrier().ok());
      EXPECT_GE(arrived.load(), round * world_size());
      ASSERT_TRUE(collective.Barrier().ok());
    }
  });
}

TEST_P(CollectiveContract, OperationsOfDifferentKindsFollowEachOther) {
  Run([&](Collective& collective) {
    for (int round = 0; round < 50; ++round) {
      std::vector<float> input(round * world_size(), 1.0f);
      std::vector<float> shard(round);
      ASSERT_EQ(collective.ReduceScatterSum(input, absl::MakeSpan(shard)), absl::OkStatus());
      EXPECT_THAT(shard, Each(static_cast<float>(world_size())));
      double sum = round;
      ASSERT_TRUE(collective.AllReduceSum({&sum, 1}).ok());
      EXPECT_EQ(sum, round * world_size());
    }
  });
}

TEST(GlooCollective, APeerThatNeverCallsGivesAnErrorThatNamesIt) {
  constexpr std::chrono::milliseconds kTimeout{500};
  std::atomic<bool> reported = false;
  RunRanks(Backend::kGloo, 2, kTimeout, [&](Collective& collective) {
    if (collective.rank() == 1) {
      reported.wait(false);  // There, but in no collective.
      return;
    }
    std::vector<float> input(8), shard(4);
    const absl::Status status = collective.ReduceScatterSum(input, absl::MakeSpan(shard));
    EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
    // Ranks may be at different operations now, so every later call refuses.
    EXPECT_EQ(collective.Barrier(), status);
    reported = true;
    reported.notify_all();
  });
}

TEST(GlooCollective, APeerThatIsGoneGivesAnErrorThatNamesIt) {
  RunRanks(Backend::kGloo, 2, std::chrono::seconds(20), [&](Collective& collective) {
    if (collective.rank() == 1) return;  // Closes its connections.
    const absl::Status status = collective.Barrier();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(status.message(), HasSubstr("rank 1"));
  });
}

// The peer's process, which is killed while the large messages of an operation are on their way.
TEST(GlooCollective, APeerThatIsKilledInMidMessageIsNamedAtOnce) {
  constexpr size_t kElements = 2 << 20;  // More than the kernel's buffers hold.
  for (int kill_after_ms = 0; kill_after_ms < 40; kill_after_ms += 4) {
    const TempPath directory("store");
    std::filesystem::create_directory(directory.str());
    std::vector<float> input(2 * kElements), shard(kElements);
    const pid_t peer = fork();
    if (peer == 0) {
      gloo::rendezvous::FileStore store(directory.str());
      const auto collective = ConnectGloo({.rank = 1, .world_size = 2}, store).value();
      while (collective->ReduceScatterSum(input, absl::MakeSpan(shard)).ok()) {
      }
      _exit(1);
    }
    gloo::rendezvous::FileStore store(directory.str());
    const auto collective =
        ConnectGloo({.rank = 0, .world_size = 2, .timeout = std::chrono::seconds(20)}, store)
            .value();
    std::thread killer([&] {
      // Not to wait for anything: any instant is as good, and one of several hits a message.
      std::this_thread::sleep_for(std::chrono::milliseconds(kill_after_ms));
      kill(peer, SIGKILL);
    });
    absl::Status status;
    while ((status = collective->ReduceScatterSum(input, absl::MakeSpan(shard))).ok()) {
    }
    killer.join();
    waitpid(peer, nullptr, 0);
    ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    ASSERT_THAT(status.message(), HasSubstr("rank 1"));
  }
}

TEST(GlooCollective, APeerThatNeverArrivesGivesAnErrorThatNamesIt) {
  constexpr std::chrono::milliseconds kTimeout{300};
  gloo::rendezvous::HashStore store;
  const absl::Status status =
      ConnectGloo({.rank = 0, .world_size = 2, .connect_timeout = kTimeout}, store).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("key(s): 1"));  // A rank's number.
}

}  // namespace
}  // namespace ballast::worker
