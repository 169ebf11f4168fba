#include "cpu_optimizer_service/common/system/heap_settings.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <vector>

#include "tests/support/sanitizers.h"

namespace ballast {
namespace {

// Sanitizers bring heaps of their own.
#if !BALLAST_ASAN && !BALLAST_TSAN
constexpr size_t kMessageBytes = size_t{31} << 20;

std::unique_ptr<char[]> Message() {
  auto message = std::unique_ptr<char[]>(new char[kMessageBytes]);
  std::memset(message.get(), 1, kMessageBytes);
  return message;
}

TEST(HeapSettings, AMessageIsNotMappedAndItsMemoryStaysWhenItIsFree) {
  KeepHeapWarm();
  const size_t mapped_bytes = mallinfo2().hblkhd;
  auto message = Message();
  EXPECT_EQ(mallinfo2().hblkhd, mapped_bytes);
  message.reset();
  EXPECT_GE(mallinfo2().fordblks, kMessageBytes);
}

TEST(HeapTrimmer, GivesBackWhatLiesBetweenUsedMemory) {
  KeepHeapWarm();
  constexpr size_t kPieceBytes = 64 << 10;
  std::vector<std::unique_ptr<char[]>> pieces;
  for (size_t bytes = 0; bytes < size_t{128} << 20; bytes += kPieceBytes) {
    pieces.emplace_back(new char[kPieceBytes]);
    std::memset(pieces.back().get(), 1, kPieceBytes);
  }
  const auto resident_bytes = [] {
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    return pages * 4096;
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (i % 16 != 0) pieces[i].reset();
  }
  const size_t before_bytes = resident_bytes();
  HeapTrimmer trimmer;
  for (int tick = 0; tick < HeapTrimmer::kShortestWait; ++tick) trimmer.Tick();
  EXPECT_LT(resident_bytes() + (size_t{96} << 20), before_bytes);
}
#endif

TEST(HeapTrimmer, TrimsWhatHasBeenFreeAllTheTimeAndLessOftenWhereItIsUsedAgain) {
  size_t free_bytes = 0;
  int trims = 0;
  HeapTrimmer trimmer([&] { return free_bytes; }, [&] { ++trims; });
  const auto ticks = [&](int count) {
    const int before = trims;
    for (int tick = 0; tick < count; ++tick) trimmer.Tick();
    return trims - before;
  };
  EXPECT_EQ(ticks(10 * HeapTrimmer::kShortestWait), 0);
  for (int burst = 0; burst < 100; ++burst) {  // Used again within each wait.
    free_bytes = burst % HeapTrimmer::kShortestWait == 0 ? 0 : size_t{1} << 30;
    EXPECT_EQ(ticks(1), 0);
  }
  free_bytes = size_t{1} << 30;
  EXPECT_EQ(ticks(2 * HeapTrimmer::kShortestWait), 1);
  EXPECT_GE(ticks(1000), 1000 / HeapTrimmer::kLongestWait);
  EXPECT_LE(ticks(1000), 1000 / HeapTrimmer::kLongestWait + 1);
  free_bytes = 0;
  EXPECT_EQ(ticks(2 * HeapTrimmer::kLongestWait), 0);
  free_bytes = size_t{1} << 30;
  EXPECT_GE(ticks(2 * HeapTrimmer::kShortestWait), 1);
}

}  // namespace
}  // namespace ballast
