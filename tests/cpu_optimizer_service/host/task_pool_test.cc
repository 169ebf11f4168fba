#include "cpu_optimizer_service/host/task_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/task_queue.h"
#include "tests/cpu_optimizer_service/host/topology_for_tests.h"
#include "tests/support/address_limit.h"
#include "tests/support/sanitizers.h"
#include "tests/support/threads.h"

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

// In a process of its own: this one has threads already.
TEST(TaskPoolDeathTest, WithoutThreadsTheProcessEndsWithOneLine) {
  if (!MayForbidThreads()) {
    GTEST_SKIP() << "root has no limit of threads, and can be no other user here";
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto start = [] {
    ForbidThreads();
    TaskPool pool(2);
    pool.Start([] {});
  };
  EXPECT_EXIT(start(), testing::ExitedWithCode(1), "^the engine cannot start its threads .*\n$");
}

TEST(TaskPoolDeathTest, HoweverLittleMemoryThereIsItWorksOrEndsTheProcess) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer maps terabytes";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto work = [](int64_t bytes) noexcept {
    alarm(60);  // What waits without an end ends with this signal.
    const ScopedAddressLimit limit(bytes);
    TaskPool pool(2);
    std::atomic<bool> ran = false;
    pool.Start([&ran] { ran = true; });
    while (!ran) usleep(1000);
    _exit(0);
  };
  for (int64_t bytes = 0; bytes < int64_t{64} << 20 && !HasFailure();
       bytes += bytes / 4 + (64 << 10)) {
    SCOPED_TRACE(bytes);
    EXPECT_EXIT(
        work(bytes), [](int status) { return WIFEXITED(status) || WTERMSIG(status) == SIGABRT; },
        "^(|the engine cannot start its threads .*\n|(.|\n)*std::bad_alloc\n)$");
  }
}

TEST(TaskPool, OneThreadIsOnOneNode) {
  const TaskPool pool(1, SeveralNodesInOne(3));
  EXPECT_EQ(pool.nodes(), 1);
  EXPECT_EQ(pool.NodeOf(9, 10), 0);
}

TEST(TaskPool, ANodesShareIsThatOfItsThreads) {
  Topology topology = SeveralNodesInOne(2);
  topology.nodes[0].processors.assign(3, topology.nodes[0].processors.front());
  topology.nodes[1].processors.assign(1, topology.nodes[0].processors.front());
  const TaskPool pool(4, topology);
  ASSERT_EQ(pool.nodes(), 2);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(pool.NodeOf(i, 1000), i < 750 ? 0 : 1) << i;
}

TEST(TaskPool, EachIndexRunsOnceOnTheNodeThatItBelongsTo) {
  for (const int nodes : {2, 3}) {
    TaskPool pool(2 * nodes, SeveralNodesInOne(nodes));
    ASSERT_EQ(pool.nodes(), nodes);
    EXPECT_EQ(pool.CurrentNode(), -1);
    for (const int64_t count : {1, 2, 5, 1000}) {
      std::vector<int> runs(count, 0);
      std::vector<int> ran_on(count, -1);
      pool.ForEach(count, [&](int64_t i) {
        ++runs[i];
        ran_on[i] = pool.CurrentNode();
      });
      EXPECT_EQ(runs, std::vector<int>(count, 1));
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_EQ(ran_on[i], pool.NodeOf(i, count)) << i << " of " << count;
        EXPECT_EQ(ran_on[i], i * nodes / count);
      }
    }
    EXPECT_TRUE(pool.bound());
  }
}

TEST(TaskPool, StartedTasksRunOnTheirNode) {
  std::atomic<int> wrong = 0;
  {
    TaskPool pool(4, SeveralNodesInOne(2));
    for (int i = 0; i < 100; ++i) {
      pool.Start([&, i] { wrong += pool.CurrentNode() != i % 2; }, i % 2);
    }
  }
  EXPECT_EQ(wrong, 0);
}

// As with decisions of several jobs: each waits for work on a node whose only worker waits too.
TEST(TaskPool, TasksThatWaitForEachOthersNodesAllEnd) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int64_t> ran = 0;
    {
      TaskPool pool(2, SeveralNodesInOne(2));
      for (int task = 0; task < 4; ++task) {
        pool.Start([&] { pool.ForEach(100, [&](int64_t) { ++ran; }); });
      }
      pool.ForEach(100, [&](int64_t) { ++ran; });
    }
    ASSERT_EQ(ran, 500);
  }
}

TEST(TaskPool, ForEachOverNodesMayBeNested) {
  TaskPool pool(3, SeveralNodesInOne(3));
  std::atomic<int64_t> ran = 0;
  pool.ForEach(9, [&](int64_t) { pool.ForEach(9, [&](int64_t) { ++ran; }); });
  EXPECT_EQ(ran, 81);
}

TEST(TaskPool, ALoopThatNobodyWaitsForEndsWithItsLastWord) {
  for (const int nodes : {1, 3}) {
    std::vector<int> runs(1000, 0);
    std::latch over(2);
    TaskPool pool(3, SeveralNodesInOne(nodes));
    auto owned = std::make_shared<int>(0);
    pool.ForEach(
        1000, [&, owned](int64_t i) { ++runs[i]; },
        [&, weak = std::weak_ptr(owned)] {
          EXPECT_EQ(runs, std::vector<int>(1000, 1));
          EXPECT_EQ(weak.use_count(), 1) << "what the loop owned is gone";
          over.count_down();
        });
    pool.ForEach(
        0, [](int64_t) { FAIL(); }, [&] { over.count_down(); });
    over.wait();
  }
}

// A turn for which what comes later waits, but not for ever.
class Turn {
 public:
  void Come() {
    MutexLock lock(mutex_);
    come_ = true;
    changed_.NotifyAll();
  }
  bool Await() {
    MutexLock lock(mutex_);
    while (!come_ && changed_.WaitUntil(mutex_, limit_)) continue;
    return come_;
  }

 private:
  const std::chrono::steady_clock::time_point limit_ =
      std::chrono::steady_clock::now() + std::chrono::minutes(1);
  Mutex mutex_;
  CondVar changed_;
  bool come_ ABSL_GUARDED_BY(mutex_) = false;
};

// As when one job touches 100 GB, or updates 100,000 chunks, and another has a step to decide.
TEST(TaskPool, ATaskThatComesLaterHasItsTurnInTheMiddleOfALongLoop) {
  TaskPool pool(2);
  constexpr int64_t kIndices = 100;
  Turn turn;
  std::atomic<bool> came = true;
  std::latch over(2);
  pool.ForEach(
      kIndices,
      [&](int64_t i) {
        if (i == 0) {
          pool.Start([&] {
            turn.Come();
            over.count_down();
          });
        }
        // As long as a slice: a turn is due after each.
        std::this_thread::sleep_for(TaskPool::kSlice);
        if (i >= kIndices / 2 && !turn.Await()) came = false;
      },
      [&] { over.count_down(); });
  over.wait();
  EXPECT_TRUE(came);
}

TEST(TaskQueue, ManyTasksOfOneDoNotHoldUpThoseOfAnother) {
  TaskPool pool(2);
  TaskQueue many(pool);
  TaskQueue few(pool);
  constexpr int64_t kTasks = 100;
  Turn turn;
  std::atomic<bool> came = true;
  std::latch over(kTasks + 1);
  for (int64_t i = 0; i < kTasks; ++i) {
    many.Start([&, i] {
      if (i == 10) {  // All threads are at work for the one queue.
        few.Start([&] {
          turn.Come();
          over.count_down();
        });
      }
      std::this_thread::sleep_for(TaskPool::kSlice);
      if (i >= kTasks / 2 && !turn.Await()) came = false;
      over.count_down();
    });
  }
  over.wait();
  EXPECT_TRUE(came);
}

TEST(TaskQueue, RunsItsTasksInOrderAndOnTheirNodeAlsoWhenItIsGone) {
  std::vector<int> order;
  std::atomic<int> wrong = 0;
  {
    TaskPool pool(2, SeveralNodesInOne(2));
    {
      TaskQueue queue(pool);
      for (int i = 0; i < 1000; ++i) {
        queue.Start(
            [&, i] {
              wrong += pool.CurrentNode() != 1;
              order.push_back(i);  // The node has one thread.
            },
            1);
      }
    }
  }
  ASSERT_EQ(order.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(wrong, 0);
}

TEST(TaskPool, ThreadsThatCannotBeBoundAreTold) {
  Topology topology = SeveralNodesInOne(2);
  for (NumaNode& node : topology.nodes) node.processors = {100000};
  TaskPool pool(2, topology);
  std::atomic<int64_t> ran = 0;
  pool.ForEach(100, [&](int64_t) { ++ran; });
  EXPECT_EQ(ran, 100);
  EXPECT_FALSE(pool.bound());
}

}  // namespace
}  // namespace ballast
