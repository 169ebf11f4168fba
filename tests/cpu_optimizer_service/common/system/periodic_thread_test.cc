#include "cpu_optimizer_service/common/system/periodic_thread.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <latch>
#include <optional>
#include <string>
#include <thread>

#include "tests/support/threads.h"

namespace ballast {
namespace {

using ::std::chrono::hours;
using ::std::chrono::milliseconds;

TEST(PeriodicThread, CallsItsFunctionAgainAndAgain) {
  std::atomic<int> calls = 0;
  std::latch third(1);
  const PeriodicThread thread("test", milliseconds(1), [&] {
    if (++calls == 3) third.count_down();
  });
  third.wait();
}

// Whether every thread of this process waits, except the one that asks.
bool AllOthersSleep() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    const pid_t thread = std::stoi(task.path().filename());
    if (thread != gettid() && !ThreadSleeps(thread)) return false;
  }
  return true;
}

// A stop that does not end the wait would take an hour.
TEST(PeriodicThread, StoppedInALongPeriodEndsAtOnceWithoutACall) {
  std::atomic<int> calls = 0;
  {
    const PeriodicThread thread("test", hours(1), [&] { ++calls; });
    while (!AllOthersSleep()) std::this_thread::yield();
  }
  EXPECT_EQ(calls, 0);
}

TEST(PeriodicThread, DestroyedWaitsForTheCallThatRunsAndBeginsNoOther) {
  std::latch begun(1), goes_on(1);
  std::atomic<int> begun_calls = 0, ended_calls = 0;
  // No period at all: a call that could still begin would begin at once.
  std::optional<PeriodicThread> thread(std::in_place, "test", milliseconds(0), [&] {
    if (++begun_calls == 1) begun.count_down();
    goes_on.wait();
    ++ended_calls;
  });
  begun.wait();
  std::thread lets_go_on([&] { goes_on.count_down(); });
  thread.reset();
  const int calls = begun_calls;
  EXPECT_GE(calls, 1);
  EXPECT_EQ(ended_calls, calls);
  lets_go_on.join();
  EXPECT_EQ(begun_calls, calls);
}

}  // namespace
}  // namespace ballast
