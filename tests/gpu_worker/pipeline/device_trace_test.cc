// Spans of the tests' device, on clocks that the test sets: the host's, and a device's that began
// at another time and goes faster.
#include "gpu_worker/pipeline/device_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::nanoseconds;
using std::chrono::seconds;
using testing::ElementsAre;

constexpr uint64_t kSeeds = 8;

class Clocks {
 public:
  explicit Clocks(double rate = 1) : rate_(rate) {}
  void Pass(nanoseconds time) { host_ += time.count(); }
  nanoseconds host() const { return nanoseconds(host_.load()); }
  nanoseconds device() const {
    return seconds(777) + nanoseconds(std::llround(static_cast<double>(host_ - kStart) * rate_));
  }

 private:
  static constexpr int64_t kStart = 1'000'000'000'000;
  const double rate_;  // The device's seconds in one of the host's.
  std::atomic<int64_t> host_ = kStart;
};

// In microseconds of the host's clock.
struct Shown {
  double begin = 0;
  double end = 0;
  std::string name;
};

double Microseconds(nanoseconds time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

// A device on two clocks, a stream, and its spans in the timeline.
class Traced {
 public:
  explicit Traced(FakeDeviceOptions options = {}, double rate = 1)
      : clocks_(rate), device_(OnClocks(std::move(options))) {
    stream_ = device_.CreateStream("compute").value();
  }

  absl::Status Create(Timeline* timeline) {
    absl::StatusOr<std::unique_ptr<DeviceTrace>> trace =
        DeviceTrace::Create(device_, timeline, [this] {
          return Timeline::Clock::time_point(
              std::chrono::duration_cast<Timeline::Clock::duration>(clocks_.host()));
        });
    if (trace.ok()) trace_ = *std::move(trace);
    return trace.status();
  }
  absl::Status Create() { return Create(&timeline_); }
  void Destroy() { trace_.reset(); }

  // Gives a stream work of that length, around which there is a span.
  absl::Status Work(DeviceStream& stream, nanoseconds time, Shown* truth = nullptr) {
    return trace_->Around(stream, Track::kCompute, {.step = 1, .bucket = next_++}, [&] {
      return GiveToFakeStream(stream, "work", [this, time, truth] {
        const nanoseconds begin = clocks_.host();
        clocks_.Pass(time);
        if (truth != nullptr) *truth = {Microseconds(begin), Microseconds(clocks_.host()), ""};
      });
    });
  }
  absl::Status Work(nanoseconds time, Shown* truth = nullptr) {
    return Work(*stream_, time, truth);
  }

  std::vector<Shown> Spans() const {
    std::vector<Shown> spans;
    const nlohmann::json file = nlohmann::json::parse(timeline_.ToJson());
    for (const nlohmann::json& event : file["traceEvents"]) {
      if (event["ph"] != "X") continue;
      const double begin = event["ts"];
      spans.push_back({begin, begin + event["dur"].get<double>(), event["name"]});
    }
    return spans;
  }
  // Once there are so many.
  std::vector<Shown> AwaitSpans(size_t count) const {
    while (true) {
      std::vector<Shown> spans = Spans();
      if (spans.size() >= count) return spans;
      std::this_thread::yield();
    }
  }

  Clocks& clocks() { return clocks_; }
  FakeDevice& device() { return device_; }
  DeviceStream& stream() { return *stream_; }
  DeviceTrace& trace() { return *trace_; }

 private:
  FakeDeviceOptions OnClocks(FakeDeviceOptions options) {
    options.clock = [this] { return clocks_.device(); };
    return options;
  }

  Clocks clocks_;
  FakeDevice device_;
  std::unique_ptr<DeviceStream> stream_;
  Timeline timeline_{TimelineOptions{}};
  std::unique_ptr<DeviceTrace> trace_;
  int next_ = 0;
};

void ExpectNear(const Shown& span, const Shown& truth, nanoseconds tolerance) {
  EXPECT_NEAR(span.begin, truth.begin, Microseconds(tolerance)) << span.name;
  EXPECT_NEAR(span.end, truth.end, Microseconds(tolerance)) << span.name;
}

// ---------------------------------------------------------------- order and length

TEST(DeviceTrace, ShowsWhatAStreamDidWhenItDidIt) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Traced traced({.seed = seed});
    ASSERT_TRUE(traced.Create().ok());
    traced.clocks().Pass(milliseconds(300));
    std::vector<Shown> truth(3);
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(traced.Work(microseconds(250 * (3 - i)), &truth[i]).ok());
    }
    traced.Destroy();
    const std::vector<Shown> spans = traced.Spans();
    ASSERT_EQ(spans.size(), 3u);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(spans[i].name, "compute bucket " + std::to_string(i));
      ExpectNear(spans[i], truth[i], microseconds(1));
    }
    EXPECT_NEAR(truth[2].end - truth[0].begin, 1500, 1);
  }
}

TEST(DeviceTrace, ShowsStreamsBesideEachOther) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Traced traced({.seed = seed});
    ASSERT_TRUE(traced.Create().ok());
    {
      const auto other = traced.device().CreateStream("copy_out").value();
      std::vector<Shown> truth(6);
      for (int i = 0; i < 6; ++i) {
        DeviceStream& stream = i % 2 == 0 ? traced.stream() : *other;
        ASSERT_TRUE(traced.Work(stream, microseconds(100 + i), &truth[i]).ok());
      }
      traced.Destroy();
      const std::vector<Shown> spans = traced.Spans();
      ASSERT_EQ(spans.size(), 6u);
      // The one stream's event may come after the other's work.
      for (int i = 0; i < 6; ++i) {
        EXPECT_LE(spans[i].begin, truth[i].begin + 1) << seed;
        EXPECT_GE(spans[i].end, truth[i].end - 1) << seed;
        if (i >= 2) {
          EXPECT_GE(spans[i].begin, spans[i - 2].end - 1) << seed;
        }
      }
    }
  }
}

TEST(DeviceTrace, WaitsAtItsEndForWhatIsStillToBeRead) {
  std::atomic<bool> ending = false;
  Traced traced({.fail = [&](absl::string_view operation, absl::string_view what) {
    while (operation == "synchronize" && what == "compute" && !ending) std::this_thread::yield();
    return absl::OkStatus();
  }});
  ASSERT_TRUE(traced.Create().ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(traced.Work(microseconds(10)).ok());
  EXPECT_TRUE(traced.Spans().empty());
  ending = true;
  traced.Destroy();
  EXPECT_EQ(traced.Spans().size(), 3u);
}

TEST(DeviceTrace, TakesEventsThatWereRead) {
  std::atomic<int> created = 0;
  Traced traced({.fail = [&](absl::string_view operation, absl::string_view) {
    if (operation == "create event") ++created;
    return absl::OkStatus();
  }});
  ASSERT_TRUE(traced.Create().ok());
  created = 0;
  Shown truth;
  for (size_t i = 1; i <= 20; ++i) {
    ASSERT_TRUE(traced.Work(microseconds(i), &truth).ok());
    const std::vector<Shown> spans = traced.AwaitSpans(i);
    ExpectNear(spans.back(), truth, microseconds(1));
    const auto refuse = [] { return absl::InternalError("no"); };
    EXPECT_EQ(traced.trace().Around(traced.stream(), Track::kCopy, {}, refuse), refuse());
  }
  // A span is in the timeline a moment before its events are free.
  EXPECT_LE(created, 4);
  traced.Destroy();
  EXPECT_EQ(traced.Spans().size(), 20u);
}

// ---------------------------------------------------------------- clocks

TEST(DeviceTrace, KeepsToTheHostsClockForHours) {
  for (const double rate : {1 - 40e-6, 1 + 40e-6}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      Traced traced({.seed = seed}, rate);
      ASSERT_TRUE(traced.Create().ok());
      const nanoseconds pauses[] = {milliseconds(300), milliseconds(500), minutes(20)};
      for (size_t i = 0; i < 60; ++i) {
        traced.clocks().Pass(pauses[i % 3]);
        Shown truth;
        ASSERT_TRUE(traced.Work(milliseconds(1), &truth).ok());
        // A second's difference between the clocks, and a microsecond for a float's precision.
        ExpectNear(traced.AwaitSpans(i + 1).back(), truth, microseconds(41));
      }
    }
  }
}

TEST(DeviceTrace, TellsTimesToTheMicrosecondAfterHours) {
  Traced traced;
  ASSERT_TRUE(traced.Create().ok());
  for (size_t i = 0; i < 20; ++i) {
    traced.clocks().Pass(minutes(20) + microseconds(333));
    Shown truth;
    ASSERT_TRUE(traced.Work(microseconds(70), &truth).ok());
    ExpectNear(traced.AwaitSpans(i + 1).back(), truth, microseconds(1));
  }
}

TEST(DeviceTrace, TakesTheReadingThatWasNotHeldUp) {
  std::atomic<int> readings = 0;
  Clocks* clocks = nullptr;
  Traced traced({.fail = [&](absl::string_view operation, absl::string_view what) {
    // Between a reading of the host's clock and the event, in all but one of eight.
    if (operation == "record" && what == "trace" && readings++ % 8 != 5) {
      clocks->Pass(milliseconds(5));
    }
    return absl::OkStatus();
  }});
  clocks = &traced.clocks();
  ASSERT_TRUE(traced.Create().ok());
  for (size_t i = 0; i < 4; ++i) {
    Shown truth;
    ASSERT_TRUE(traced.Work(microseconds(100), &truth).ok());
    ExpectNear(traced.AwaitSpans(i + 1).back(), truth, microseconds(1));
    traced.clocks().Pass(seconds(30));
  }
  EXPECT_GT(readings, 8);
}

TEST(DeviceTrace, ReadsTheClocksOnceASecondAndNotForEverySpan) {
  std::atomic<int> readings = 0;
  Traced traced({.fail = [&](absl::string_view operation, absl::string_view what) {
    if (operation == "record" && what == "trace") ++readings;
    return absl::OkStatus();
  }});
  ASSERT_TRUE(traced.Create().ok());
  for (size_t i = 1; i <= 45; ++i) {
    traced.clocks().Pass(milliseconds(100));
    ASSERT_TRUE(traced.Work(microseconds(10)).ok());
    traced.AwaitSpans(i);
  }
  EXPECT_EQ(readings, 5 * 8);  // At the beginning, and four times more.
}

TEST(DeviceTrace, KeepsItsOldReadingWhileNewOnesAreWorse) {
  std::atomic<bool> slow = false;
  Clocks* clocks = nullptr;
  Traced traced({.fail = [&](absl::string_view operation, absl::string_view what) {
    if (slow && operation == "record" && what == "trace") clocks->Pass(milliseconds(20));
    return absl::OkStatus();
  }});
  clocks = &traced.clocks();
  ASSERT_TRUE(traced.Create().ok());
  slow = true;
  Shown truth;
  for (size_t i = 0; i < 4; ++i) {
    clocks->Pass(seconds(2));
    ASSERT_TRUE(traced.Work(microseconds(100), &truth).ok());
    ExpectNear(traced.AwaitSpans(i + 1).back(), truth, microseconds(2));
  }
  // In a minute the clocks may have gone apart by more than that.
  clocks->Pass(minutes(1));
  ASSERT_TRUE(traced.Work(microseconds(100), &truth).ok());
  EXPECT_NEAR(traced.AwaitSpans(5).back().end, truth.end - 20'000, 2);
}

TEST(DeviceTrace, ReadsTheClocksWithoutTheWorkOfOtherStreams) {
  std::atomic<bool> done = false;
  Traced traced({.seed = 0});  // Does only what is waited for.
  ASSERT_TRUE(traced.Create().ok());
  ASSERT_TRUE(GiveToFakeStream(traced.stream(), "long", [&] { done = true; }).ok());
  const auto other = traced.device().CreateStream("copy_out").value();
  for (size_t i = 0; i < 4; ++i) {
    traced.clocks().Pass(minutes(1));
    ASSERT_TRUE(traced.Work(*other, microseconds(10)).ok());
    traced.AwaitSpans(i + 1);
  }
  traced.Destroy();
  EXPECT_FALSE(done);
}

// ---------------------------------------------------------------- failures

TEST(DeviceTrace, SaysAtItsCreationWhatTheDeviceSays) {
  for (const absl::string_view broken :
       {"create stream", "create event", "record", "synchronize"}) {
    std::atomic<bool> go = false;
    Traced traced({.fail = [&](absl::string_view operation, absl::string_view) {
      return go && operation == broken ? absl::InternalError(broken) : absl::OkStatus();
    }});
    go = true;
    EXPECT_EQ(traced.Create(), absl::InternalError(broken));
  }
}

TEST(DeviceTrace, ShowsNothingOfALostDeviceAndSaysThatItIsLost) {
  Traced traced({.fail = [&](absl::string_view operation, absl::string_view what) {
    // When the first span is to be read.
    return operation == "synchronize" && what == "compute" ? absl::UnavailableError("lost")
                                                           : absl::OkStatus();
  }});
  ASSERT_TRUE(traced.Create().ok());
  ASSERT_TRUE(traced.Work(microseconds(10)).ok());
  while (traced.device().CreateEvent().ok()) std::this_thread::yield();
  EXPECT_EQ(traced.Work(microseconds(10)).code(), absl::StatusCode::kUnavailable);
  traced.Destroy();
  EXPECT_TRUE(traced.Spans().empty());
}

TEST(DeviceTrace, LeavesOutASpanThatCannotBeReadAndNoOther) {
  std::atomic<int> queries = 0;
  Traced traced({.fail = [&](absl::string_view operation, absl::string_view) {
    // A span that begins and ends after the reading has two, so this is the end of the second.
    return operation == "query" && ++queries == 4 ? absl::InternalError("no") : absl::OkStatus();
  }});
  ASSERT_TRUE(traced.Create().ok());
  traced.clocks().Pass(milliseconds(1));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(traced.Work(microseconds(10)).ok());
  traced.Destroy();
  std::vector<std::string> names;
  for (const Shown& span : traced.Spans()) names.push_back(span.name);
  EXPECT_THAT(names, ElementsAre("compute bucket 0", "compute bucket 2"));
}

TEST(DeviceTrace, GoesOnWithItsOldReadingWhereNoNewOneCanBeHad) {
  for (const absl::string_view broken : {"create event", "record", "synchronize"}) {
    std::atomic<bool> go = false;
    std::atomic<int> refused = 0;
    Traced traced({.fail = [&](absl::string_view operation, absl::string_view what) {
      if (!go || operation != broken || what == "compute") return absl::OkStatus();
      ++refused;
      return absl::ResourceExhaustedError(broken);
    }});
    ASSERT_TRUE(traced.Create().ok());
    ASSERT_TRUE(traced.Work(microseconds(10)).ok());
    traced.AwaitSpans(1);
    // Its events may come back to the pool only now.
    ASSERT_TRUE(traced.Work(microseconds(10)).ok());
    traced.AwaitSpans(2);
    go = true;
    for (size_t i = 3; i <= 5; ++i) {
      traced.clocks().Pass(seconds(3));
      Shown truth;
      ASSERT_TRUE(traced.Work(microseconds(10), &truth).ok()) << broken;
      ExpectNear(traced.AwaitSpans(i).back(), truth, microseconds(2));
    }
    EXPECT_EQ(refused, 3) << broken;  // Each time once, and no more often.
  }
}

// ---------------------------------------------------------------- without a timeline

TEST(DeviceTrace, AsksTheDeviceNothingWithoutSpansToKeep) {
  static std::vector<std::string> ranges;
  ranges.clear();
  Timeline for_profiler({.most_spans = 0,
                         .profiler = {.begin = [](const char* name) { ranges.push_back(name); },
                                      .end = [] { ranges.push_back("end"); }}});
  for (Timeline* timeline : {&for_profiler, static_cast<Timeline*>(nullptr)}) {
    std::atomic<int> operations = 0;
    Traced traced({.fail = [&](absl::string_view, absl::string_view) {
      ++operations;
      return absl::OkStatus();
    }});
    operations = 0;
    ASSERT_TRUE(traced.Create(timeline).ok());
    ASSERT_TRUE(traced.Work(microseconds(10)).ok());
    EXPECT_EQ(operations, 1);  // The work itself.
    EXPECT_EQ(traced.trace().timeline(), timeline);
  }
  EXPECT_THAT(ranges, ElementsAre("compute bucket 0", "end"));
}

}  // namespace
}  // namespace ballast::worker
