#include "gpu_worker/base/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/gpu_worker/temp_path.h"
#include "tests/support/messages.h"
#include "tests/support/sanitizers.h"

// Allocations of this thread, by any operator new of this program. ThreadSanitizer has operators of
// its own, which cannot be replaced; nothing is counted there.
static thread_local uint64_t allocations = 0;

#if !BALLAST_TSAN
void* operator new(size_t size_bytes) {
  ++allocations;
  if (void* memory = std::malloc(size_bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace ballast::worker {
namespace {

using std::chrono::microseconds;
using testing::ElementsAre;
using TimePoint = Timeline::Clock::time_point;

std::vector<nlohmann::json> SpansOf(const Timeline& timeline) {
  std::vector<nlohmann::json> spans;
  const nlohmann::json file = nlohmann::json::parse(timeline.ToJson());
  for (const nlohmann::json& event : file["traceEvents"]) {
    if (event["ph"] == "X") spans.push_back(event);
  }
  return spans;
}

TEST(Timeline, PutsEachSpanOnItsTrackInMicroseconds) {
  Timeline timeline({.rank = 2});
  const TimePoint begin(microseconds(1000));
  timeline.Add(Track::kReduce, {.step = 7, .bucket = 3}, begin, begin + microseconds(250));
  timeline.Add(Track::kStep, {.step = 7}, begin, begin + microseconds(9000));

  const nlohmann::json file = nlohmann::json::parse(timeline.ToJson());
  std::map<int, std::string> tracks;
  for (const nlohmann::json& event : file["traceEvents"]) {
    EXPECT_EQ(event["pid"], 2);
    if (event["name"] == "thread_name") tracks[event["tid"]] = event["args"]["name"];
  }
  const std::vector<nlohmann::json> spans = SpansOf(timeline);
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0]["name"], "reduce bucket 3");
  EXPECT_EQ(tracks[spans[0]["tid"]], "reduce");
  EXPECT_EQ(spans[0]["ts"], 1000);
  EXPECT_EQ(spans[0]["dur"], 250);
  EXPECT_EQ(spans[0]["args"], nlohmann::json({{"step", 7}, {"bucket", 3}}));
  EXPECT_EQ(spans[1]["name"], "step 7");
  EXPECT_EQ(tracks[spans[1]["tid"]], "step");
}

TEST(Timeline, CountsWhatItDoesNotKeep) {
  Timeline timeline({.most_spans = 2});
  for (int i = 0; i < 5; ++i) timeline.Add(Track::kCopy, {}, TimePoint(), TimePoint());
  EXPECT_EQ(SpansOf(timeline).size(), 2u);
  EXPECT_EQ(nlohmann::json::parse(timeline.ToJson())["otherData"]["dropped_spans"], 3);
}

TEST(TimelineScope, LastsFromItsBeginningToItsEnd) {
  Timeline timeline({});
  const TimePoint before = Timeline::Clock::now();
  { TimelineScope scope(&timeline, Track::kReceive, {.step = 1}); }
  const TimePoint after = Timeline::Clock::now();
  const std::vector<nlohmann::json> spans = SpansOf(timeline);
  ASSERT_EQ(spans.size(), 1u);
  const auto in_microseconds = [](TimePoint time) {
    return std::chrono::duration<double, std::micro>(time.time_since_epoch()).count();
  };
  const double begin = spans[0]["ts"];
  const double duration = spans[0]["dur"];
  EXPECT_GE(begin, in_microseconds(before));
  EXPECT_LE(begin + duration, in_microseconds(after) + 1);  // A microsecond for the sum's rounding.
}

TEST(TimelineScope, DoesNothingWithoutATimeline) {
  const uint64_t before = allocations;
  { TimelineScope scope(nullptr, Track::kReceive, {.step = 1}); }
  EXPECT_EQ(allocations, before);
}

std::vector<std::string>& ProfilerCalls() {
  static std::vector<std::string> calls;
  return calls;
}

TEST(TimelineScope, IsARangeForTheProfiler) {
  ProfilerCalls().clear();
  Timeline timeline(
      {.most_spans = 0,
       .profiler = {.begin = [](const char* name) { ProfilerCalls().push_back(name); },
                    .end = [] { ProfilerCalls().push_back("end"); }}});
  {
    TimelineScope step(&timeline, Track::kStep, {.step = 4});
    TimelineScope scope(&timeline, Track::kCompute, {.step = 4, .micro_step = 1});
  }
  EXPECT_THAT(ProfilerCalls(), ElementsAre("step 4", "compute micro-step 1", "end", "end"));
  EXPECT_TRUE(SpansOf(timeline).empty());
}

constexpr SpanOf kLongest = {.step = std::numeric_limits<uint64_t>::max(),
                             .micro_step = std::numeric_limits<int>::max(),
                             .bucket = std::numeric_limits<int>::max(),
                             .chunk = std::numeric_limits<int>::max()};

TEST(TimelineScope, NamesItsRangeInFullWithoutTheHeap) {
  static char seen[256];
  Timeline timeline(
      {.most_spans = 0,
       .profiler = {
           .begin = [](const char* name) { absl::SNPrintF(seen, sizeof(seen), "%s", name); },
           .end = [] {}}});
  const uint64_t before = allocations;
  { TimelineScope scope(&timeline, Track::kStep, kLongest); }
  EXPECT_EQ(allocations, before);
  EXPECT_STREQ(
      seen, "step 18446744073709551615 micro-step 2147483647 bucket 2147483647 chunk 2147483647");
}

TEST(TimelineScope, IsNotCountedAsDroppedWhereNoSpansAreKept) {
  Timeline timeline({.most_spans = 0});
  { TimelineScope scope(&timeline, Track::kReceive, {.step = 1}); }
  EXPECT_EQ(nlohmann::json::parse(timeline.ToJson())["otherData"]["dropped_spans"], 0);
}

TEST(Timeline, IsWrittenWhole) {
  Timeline timeline({});
  timeline.Add(Track::kGather, {.step = 1, .bucket = 0}, TimePoint(), TimePoint());
  const TempPath file("trace.json");
  const std::string& path = file.str();
  ASSERT_TRUE(timeline.Write(path).ok());
  std::stringstream contents;
  contents << std::ifstream(path).rdbuf();
  EXPECT_EQ(contents.str(), timeline.ToJson());
}

TEST(Timeline, SaysWhereItCannotBeWritten) {
  const absl::Status status = Timeline({}).Write("/proc/no such folder/trace.json");
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
}

}  // namespace
}  // namespace ballast::worker
