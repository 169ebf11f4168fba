#include "cpu_optimizer_service/host/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

namespace ballast {
namespace {

constexpr TraceEventKind kKind = TraceEventKind::kUpdated;

TEST(TraceRecorder, RecordsNothingUntilItIsStarted) {
  TraceRecorder recorder;
  EXPECT_FALSE(recorder.wants(0));
  EXPECT_FALSE(recorder.wants(1));
  EXPECT_EQ(recorder.Begin(1), 0);
  recorder.Record(kKind, 1, 0, TraceNow());
  recorder.Mark(TraceEventKind::kBegun, 1);
  { const TraceSpan span(recorder, kKind, 1, 0); }
  ASSERT_TRUE(recorder.Start(1, 1, 10).ok());
  EXPECT_TRUE(recorder.Stop().events.empty());
}

TEST(TraceRecorder, KeepsTheEventsOfTheStepsThatAreWanted) {
  TraceRecorder recorder;
  const int64_t before_ns = TraceNow();
  ASSERT_TRUE(recorder.Start(5, 2, 10).ok());
  for (uint64_t step = 4; step <= 7; ++step) {
    recorder.Mark(TraceEventKind::kBegun, step);
    const TraceSpan span(recorder, kKind, step, static_cast<int>(10 * step));
  }
  const Trace trace = recorder.Stop();
  ASSERT_EQ(trace.events.size(), 4u);
  EXPECT_EQ(trace.dropped_events, 0u);
  for (int i = 0; i < 2; ++i) {
    const TraceEvent& begun = trace.events[2 * i];
    EXPECT_EQ(begun.kind, TraceEventKind::kBegun);
    EXPECT_EQ(begun.step, 5u + i);
    EXPECT_EQ(begun.chunk, -1);
    EXPECT_EQ(begun.begin_ns, begun.end_ns);
    const TraceEvent& span = trace.events[2 * i + 1];
    EXPECT_EQ(span.kind, kKind);
    EXPECT_EQ(span.step, 5u + i);
    EXPECT_EQ(span.chunk, 50 + 10 * i);
    EXPECT_GE(span.begin_ns, begun.begin_ns);
    EXPECT_GE(span.end_ns, span.begin_ns);
    EXPECT_GE(begun.begin_ns, before_ns);
    EXPECT_EQ(span.thread, begun.thread);
  }
}

TEST(TraceRecorder, LeavesOutWhatBeganBeforeItWasStarted) {
  TraceRecorder recorder;
  {
    const TraceSpan early(recorder, kKind, 1, 0);
    ASSERT_TRUE(recorder.Start(1, 1, 10).ok());
  }
  EXPECT_TRUE(recorder.Stop().events.empty());
}

TEST(TraceRecorder, CountsWhatFindsNoRoom) {
  TraceRecorder recorder;
  ASSERT_TRUE(recorder.Start(1, 1, 3).ok());
  for (int chunk = 0; chunk < 5; ++chunk) recorder.Record(kKind, 1, chunk, TraceNow());
  const Trace trace = recorder.Stop();
  EXPECT_EQ(trace.events.size(), 3u);
  EXPECT_EQ(trace.dropped_events, 2u);
  // The next trace has all its room again.
  ASSERT_TRUE(recorder.Start(1, 1, 3).ok());
  recorder.Record(kKind, 1, 0, TraceNow());
  const Trace next = recorder.Stop();
  EXPECT_EQ(next.events.size(), 1u);
  EXPECT_EQ(next.dropped_events, 0u);
}

TEST(TraceRecorder, TakesOneTraceAtATime) {
  TraceRecorder recorder;
  ASSERT_TRUE(recorder.Start(1, 1, 10).ok());
  EXPECT_EQ(recorder.Start(2, 1, 10).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(recorder.wants(1));
  EXPECT_FALSE(recorder.wants(2));
  recorder.Stop();
  EXPECT_TRUE(recorder.Start(2, 1, 10).ok());
}

TEST(TraceRecorder, KnowsWhenTheLastStepsWeightsHaveGone) {
  TraceRecorder recorder;
  ASSERT_TRUE(recorder.Start(1, 2, 100).ok());
  recorder.WillSend(1);  // Not of the last step.
  EXPECT_TRUE(recorder.all_sent());
  recorder.Mark(TraceEventKind::kBegun, 2);
  recorder.WillSend(2);
  recorder.WillSend(2);
  recorder.Record(TraceEventKind::kSent, 2, 0, recorder.Begin(2));
  recorder.Record(TraceEventKind::kSent, 1, 0, recorder.Begin(1));
  EXPECT_FALSE(recorder.all_sent());
  recorder.Record(TraceEventKind::kSent, 2, 1, recorder.Begin(2));
  EXPECT_TRUE(recorder.all_sent());
  // What the streams of an aborted attempt took with them is not waited for.
  recorder.WillSend(2);
  recorder.Mark(TraceEventKind::kBegun, 2);
  EXPECT_TRUE(recorder.all_sent());
}

// Threads record all the time; traces start and stop among them.
TEST(TraceRecorder, LosesAndMixesUpNothingAmongThreads) {
  constexpr int kThreads = 4;
  constexpr int64_t kRoom = 5000;
  TraceRecorder recorder;
  std::atomic<uint64_t> step = 0;
  std::atomic<int64_t> spans = 0;
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      while (!done.load()) {
        { const TraceSpan span(recorder, kKind, step.load(), t); }
        ++spans;
      }
    });
  }
  std::set<uint32_t> numbers;
  for (uint64_t round = 1; round <= 50; ++round) {
    step = round;
    ASSERT_TRUE(recorder.Start(round, 1, kRoom).ok());
    const int64_t start_ns = TraceNow();
    // Until one thread at least has begun and ended a span after the start.
    const int64_t enough = spans + kThreads + 1;
    while (TraceNow() < start_ns + 200'000 || spans < enough) std::this_thread::yield();
    const Trace trace = recorder.Stop();
    const int64_t stop_ns = TraceNow();
    EXPECT_GE(trace.events.size(), 1U);
    EXPECT_LE(trace.events.size(), static_cast<size_t>(kRoom));
    if (trace.dropped_events > 0) EXPECT_EQ(trace.events.size(), static_cast<size_t>(kRoom));
    EXPECT_TRUE(std::is_sorted(
        trace.events.begin(), trace.events.end(),
        [](const TraceEvent& a, const TraceEvent& b) { return a.begin_ns < b.begin_ns; }));
    for (const TraceEvent& event : trace.events) {
      EXPECT_EQ(event.step, round);
      EXPECT_LE(event.begin_ns, event.end_ns);
      EXPECT_LE(event.end_ns, stop_ns);
      numbers.insert(event.thread);
    }
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(numbers.size(), static_cast<size_t>(kThreads));

  // Whatever each thread records arrives.
  ASSERT_TRUE(recorder.Start(1, 1, 4 * kThreads * 1000).ok());
  threads.clear();
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) recorder.Record(kKind, 1, 1000 * t + i, TraceNow());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<int> chunks;
  for (const TraceEvent& event : recorder.Stop().events) chunks.insert(event.chunk);
  EXPECT_EQ(chunks.size(), static_cast<size_t>(kThreads * 1000));
}

}  // namespace
}  // namespace ballast
