#include "client/tensors/weight_copies.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <latch>
#include <thread>
#include <vector>

namespace ballast::client::weight_copies_test {
namespace {

constexpr int64_t kLarge = int64_t{1} << 30;
constexpr int kChunks = 500;

TEST(WeightCopies, CopyEachChunkOnceBeforeTheyFinish) {
  for (const int64_t bytes : {int64_t{0}, kLarge}) {
    std::vector<std::atomic<int>> copied(kChunks);
    CopyThreads threads(2);
    WeightCopies copies(threads, kChunks, bytes, [&](int chunk) { ++copied[chunk]; });
    for (int step = 1; step <= 3; ++step) {
      std::thread session([&] {
        for (int chunk = 0; chunk < kChunks; ++chunk) copies.Add(chunk);
      });
      copies.Finish();  // A wait that ended too early: the next one goes on.
      session.join();
      copies.Finish();
      for (const std::atomic<int>& times : copied) ASSERT_EQ(times, step);
    }
  }
}

TEST(WeightCopies, BeginBeforeTheyAreAwaited) {
  std::latch copied(2);
  CopyThreads threads(2);
  WeightCopies copies(threads, 2, kLarge, [&](int) { copied.arrive_and_wait(); });
  copies.Add(0);
  copies.Add(1);
  copied.wait();
  copies.Finish();
}

TEST(WeightCopies, FinishWhenWhatIsUnderWayHasEnded) {
  std::latch begun(1);
  std::atomic<bool> ended = false;
  CopyThreads threads(1);
  WeightCopies copies(threads, 1, kLarge, [&](int) {
    begun.count_down();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    ended = true;
  });
  copies.Add(0);
  begun.wait();
  copies.Finish();
  EXPECT_TRUE(ended);
}

TEST(WeightCopies, FinishWhatIsAskedForAndLeaveTheRest) {
  std::vector<int> copied;
  CopyThreads threads(1);
  WeightCopies copies(threads, 4, 0, [&](int chunk) { copied.push_back(chunk); });
  for (const int chunk : {0, 1, 2, 3}) copies.Add(chunk);
  copies.Finish({2, 1});
  EXPECT_EQ(copied, std::vector<int>({2, 1}));
  copies.Finish({2});
  copies.Finish();
  EXPECT_EQ(copied, std::vector<int>({2, 1, 3, 0}));
}

TEST(WeightCopies, WaitForWhatIsAskedForAndForNothingElse) {
  std::latch begun(2), may_end(1);
  std::atomic<bool> ended = false;
  CopyThreads threads(2);
  WeightCopies copies(threads, 2, kLarge, [&](int chunk) {
    begun.count_down();
    if (chunk == 0) return may_end.wait();
    begun.wait();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    ended = true;
  });
  copies.Add(0);
  copies.Add(1);
  begun.wait();
  copies.Finish({1});
  EXPECT_TRUE(ended);
  may_end.count_down();
  copies.Finish();
}

TEST(WeightCopies, StoppedCopyNothingAnyMore) {
  std::atomic<int> begun = 0, ended = 0;
  std::latch copying(1), stopping(1);
  CopyThreads threads(1);
  WeightCopies copies(threads, kChunks, kLarge, [&](int) {
    if (begun++ == 0) {
      copying.count_down();
      stopping.wait();
    }
    ++ended;
  });
  for (int chunk = 0; chunk < 10; ++chunk) copies.Add(chunk);
  copying.wait();
  std::thread stopper([&] { copies.Stop(); });
  stopping.count_down();
  stopper.join();
  const int at_stop = begun;
  EXPECT_EQ(at_stop, ended);
  copies.Add(0);
  copies.Finish();
  EXPECT_EQ(begun, at_stop);
}

}  // namespace
}  // namespace ballast::client::weight_copies_test
