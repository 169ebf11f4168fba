#include "cpu_optimizer_service/task_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "cpu_optimizer_service/common/mutex.h"

namespace ballast {
namespace {

TEST(TaskPool, ForEachRunsEveryIndexOnceAndWaits) {
  TaskPool pool(4);
  std::vector<int> runs(10000, 0);  // Plain memory: the wait is the only order there is.
  pool.ForEach(10000, [&](int64_t i) { ++runs[i]; });
  EXPECT_EQ(runs, std::vector<int>(10000, 1));
  pool.ForEach(0, [&](int64_t) { FAIL(); });
}

TEST(TaskPool, StartedTasksSeeWhatCameBeforeAndMayForEach) {
  std::vector<int> values(1000, 0);
  Mutex mutex;
  CondVar changed;
  bool done = false;
  TaskPool pool(2);
  values[0] = 7;
  pool.Start([&] {
    EXPECT_EQ(values[0], 7);
    pool.ForEach(1000, [&](int64_t i) { values[i] = static_cast<int>(i); });
    MutexLock lock(mutex);
    done = true;
    changed.NotifyAll();
  });
  MutexLock lock(mutex);
  while (!done) changed.Wait(mutex);
  EXPECT_EQ(values[999], 999);
}

TEST(TaskPool, TheDestructorWaitsForStartedTasks) {
  std::atomic<int> done = 0;
  {
    TaskPool pool(2);
    for (int i = 0; i < 100; ++i) pool.Start([&] { ++done; });
  }
  EXPECT_EQ(done, 100);
}

TEST(TaskPool, WhatATaskOwnsIsGoneBeforeThePoolIs) {
  struct Owned {
    explicit Owned(std::atomic<int>& alive) : alive(alive) { ++alive; }
    ~Owned() { --alive; }
    std::atomic<int>& alive;
  };
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> alive = 0;
    {
      TaskPool pool(2);
      auto owned = std::make_shared<Owned>(alive);
      pool.Start([owned] {});
      owned.reset();
    }
    ASSERT_EQ(alive, 0);
  }
}

}  // namespace
}  // namespace ballast
