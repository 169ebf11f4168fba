#include "cpu_optimizer_service/common/system/helper_threads.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <latch>
#include <memory>

namespace ballast {
namespace {

TEST(HelperThreads, RunTasksBesideOneAnother) {
  std::latch all_run(3);
  {
    HelperThreads threads(3);
    // Each waits for the others.
    for (int i = 0; i < 3; ++i) threads.Run([&] { all_run.arrive_and_wait(); });
    all_run.wait();
  }
}

TEST(HelperThreads, RunNoMoreTasksAtOnceThanTheyMay) {
  std::atomic<int> running = 0, most = 0, run = 0;
  std::latch done(50);
  HelperThreads threads(2);
  for (int i = 0; i < 50; ++i) {
    threads.Run([&] {
      most = std::max(most.load(), ++running);
      std::this_thread::yield();
      --running;
      ++run;
      done.count_down();
    });
  }
  done.wait();
  EXPECT_EQ(run, 50);
  EXPECT_LE(most, 2);
}

TEST(HelperThreads, DestroyedWaitForWhatRunsAndDropTheRest) {
  std::latch begun(1), destroying(1);
  std::atomic<bool> finished = false;
  const auto dropped = std::make_shared<int>(0);
  std::thread releaser;
  {
    HelperThreads threads(1);
    threads.Run([&] {
      begun.count_down();
      destroying.wait();
      finished = true;
    });
    begun.wait();
    threads.Run([&, dropped] { ADD_FAILURE() << "not to be begun any more"; });
    EXPECT_EQ(dropped.use_count(), 2);
    // The destructor takes the task that waits before it waits for the one that runs.
    releaser = std::thread([&] {
      while (dropped.use_count() > 1) std::this_thread::yield();
      destroying.count_down();
    });
  }
  releaser.join();
  EXPECT_TRUE(finished);
}

int NiceOfThisThread() { return getpriority(PRIO_PROCESS, 0); }

TEST(HelperThreads, OfTheLowestPriorityAreAloneInThat) {
  const int before = NiceOfThisThread();
  std::atomic<int> lowest = 0, normal = 0;
  std::latch done(2);
  HelperThreads background(1, HelperThreads::Priority::kLowest);
  HelperThreads threads(1);
  background.Run([&] {
    lowest = NiceOfThisThread();
    done.count_down();
  });
  threads.Run([&] {
    normal = NiceOfThisThread();
    done.count_down();
  });
  done.wait();
  EXPECT_EQ(lowest, 19);
  EXPECT_EQ(normal, before);
  EXPECT_EQ(NiceOfThisThread(), before);
}

}  // namespace
}  // namespace ballast
