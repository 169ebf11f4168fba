#include "client/tensors/copy_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <latch>
#include <new>
#include <thread>
#include <vector>

namespace ballast::client {
namespace {

constexpr int64_t kLarge = int64_t{1} << 30;

TEST(CopyThreads, DoEachIndexOnce) {
  CopyThreads threads(3);
  for (const int64_t bytes : {int64_t{0}, kLarge}) {
    for (const int64_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> done(count);
      EXPECT_TRUE(threads
                      .ForEach(count, bytes,
                               [&](int64_t i) {
                                 ++done[i];
                                 return absl::OkStatus();
                               })
                      .ok());
      for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
    }
  }
}

TEST(CopyThreads, WorkBesideTheCallerWhereThereIsMuch) {
  CopyThreads threads(2);
  std::latch all_there(3);  // Each waits for the others.
  EXPECT_TRUE(threads
                  .ForEach(3, kLarge,
                           [&](int64_t) {
                             all_there.arrive_and_wait();
                             return absl::OkStatus();
                           })
                  .ok());
}

TEST(CopyThreads, ReturnWhenTheOthersHaveEnded) {
  CopyThreads threads(1);
  const std::thread::id caller = std::this_thread::get_id();
  std::latch both_there(2);
  std::atomic<bool> ended = false;
  EXPECT_TRUE(threads
                  .ForEach(2, kLarge,
                           [&](int64_t) {
                             both_there.arrive_and_wait();
                             if (std::this_thread::get_id() == caller) return absl::OkStatus();
                             for (int i = 0; i < 1000; ++i) std::this_thread::yield();
                             ended = true;
                             return absl::OkStatus();
                           })
                  .ok());
  EXPECT_TRUE(ended);
}

TEST(CopyThreads, LeaveLittleToTheCaller) {
  CopyThreads threads(2);
  EXPECT_EQ(threads.WorthFor(1000), 0);
  EXPECT_EQ(threads.WorthFor(kLarge), 2);
  const std::thread::id caller = std::this_thread::get_id();
  EXPECT_TRUE(threads
                  .ForEach(100, 1000,
                           [&](int64_t) {
                             EXPECT_EQ(std::this_thread::get_id(), caller);
                             return absl::OkStatus();
                           })
                  .ok());
}

TEST(CopyThreads, BeginNoMoreAfterAnError) {
  CopyThreads threads(2);
  std::atomic<int64_t> begun = 0;
  const absl::Status status = threads.ForEach(1000, kLarge, [&](int64_t i) -> absl::Status {
    return ++begun, i < 5 ? absl::OkStatus() : absl::DataLossError("the sixth");
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_LE(begun, 5 + 3) << "none of the three begins another after its own";
}

}  // namespace
}  // namespace ballast::client
