#include "client/cli/chrome_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/client/cli/trace_for_tests.h"
#include "tests/client/job_for_tests.h"
#include "tests/support/messages.h"

namespace ballast::client::cli {
namespace {

using nlohmann::json;

class ChromeTraceTest : public testing::Test {
 protected:
  json Parse(const std::vector<v1::TraceEvent>& events, uint64_t dropped_events = 0) {
    ChromeTrace trace("gpt", layout_);
    std::string text = trace.Head();
    for (const v1::TraceEvent& event : events) text += trace.Add(event);
    text += trace.Tail(dropped_events);
    EXPECT_TRUE(json::accept(text)) << text;
    return json::parse(text);
  }
  // The events of that name, without those that only describe tracks.
  static json Named(const json& trace, const std::string& name) {
    json found = json::array();
    for (const json& event : trace["traceEvents"]) {
      if (event["ph"] != "M" && event["name"] == name) found.push_back(event);
    }
    return found;
  }
  static std::string TrackName(const json& trace, const json& tid) {
    for (const json& event : trace["traceEvents"]) {
      if (event["name"] == "thread_name" && event["tid"] == tid) return event["args"]["name"];
    }
    return "";
  }

  const Layout layout_ = Layout::Create(SmallJob("gpt", 2).layout).value();
};

TEST_F(ChromeTraceTest, ShowsAChunkOnItsThread) {
  const json trace = Parse({ChunkEvent(v1::ARRIVED, 13, 3, 5'000'000'123, 5'000'002'623, 7)});
  EXPECT_EQ(trace["displayTimeUnit"], "ms");
  const json arrived = Named(trace, "arrived chunk 3");
  ASSERT_EQ(arrived.size(), 1u);
  EXPECT_EQ(arrived[0]["ph"], "X");
  EXPECT_EQ(arrived[0]["ts"], 5000000.123);
  EXPECT_EQ(arrived[0]["dur"], 2.5);
  EXPECT_EQ(arrived[0]["args"]["step"], 13);
  EXPECT_EQ(arrived[0]["args"]["chunk"], 3);
  EXPECT_EQ(arrived[0]["args"]["rank"], layout_.chunks()[3].rank);
  EXPECT_EQ(arrived[0]["args"]["parameter"], "wte");
  EXPECT_EQ(TrackName(trace, arrived[0]["tid"]), "service thread 7");
  EXPECT_EQ(trace["traceEvents"][0]["args"]["name"], "ballast job gpt");
}

TEST_F(ChromeTraceTest, ShowsAStepFromBeginToCommit) {
  const json trace =
      Parse({StepEvent(v1::BEGUN, 13, 1000, 1000), ChunkEvent(v1::UPDATED, 13, 0, 4000, 5000, 1),
             StepEvent(v1::DECIDED, 13, 2000, 3000), StepEvent(v1::COMMITTED, 13, 6000, 6000)});
  const json step = Named(trace, "step 13");
  ASSERT_EQ(step.size(), 1u);
  EXPECT_EQ(step[0]["ts"], 1);
  EXPECT_EQ(step[0]["dur"], 5);
  EXPECT_EQ(Named(trace, "deciding step 13")[0]["dur"], 1);
  EXPECT_EQ(Named(trace, "step 13 begun")[0]["ts"], 1);
  EXPECT_EQ(Named(trace, "step 13 decided")[0]["ts"], 3);
  EXPECT_EQ(Named(trace, "step 13 committed")[0]["ts"], 6);
  for (const char* instant : {"step 13 begun", "step 13 decided", "step 13 committed"}) {
    EXPECT_EQ(Named(trace, instant)[0]["ph"], "i");
    EXPECT_EQ(TrackName(trace, Named(trace, instant)[0]["tid"]), "steps");
  }
}

// An aborted attempt has no end, and the next attempt has its own beginning.
TEST_F(ChromeTraceTest, ShowsAStepThatIsDoneAgainFromItsLastBegin) {
  const json trace =
      Parse({StepEvent(v1::BEGUN, 13, 1000, 1000), StepEvent(v1::BEGUN, 13, 4000, 4000),
             StepEvent(v1::COMMITTED, 13, 6000, 6000)});
  EXPECT_EQ(Named(trace, "step 13 begun").size(), 2u);
  ASSERT_EQ(Named(trace, "step 13").size(), 1u);
  EXPECT_EQ(Named(trace, "step 13")[0]["ts"], 4);
}

TEST_F(ChromeTraceTest, ShowsWeightsThatWentTogetherAsOneEvent) {
  const auto sent = [](int chunk, int64_t begin_ns, int64_t end_ns) {
    return ChunkEvent(v1::SENT, 13, chunk, begin_ns, end_ns, 4);
  };
  ASSERT_EQ(layout_.chunks()[0].rank, layout_.chunks()[2].rank);
  ASSERT_NE(layout_.chunks()[0].rank, layout_.chunks()[3].rank);
  const json trace =
      Parse({sent(0, 1000, 2000), sent(2, 1000, 2001), sent(3, 1000, 3000), sent(1, 5000, 6000)});
  const json both = Named(trace, "sent 2 chunks");
  ASSERT_EQ(both.size(), 1u);
  EXPECT_EQ(both[0]["args"]["chunks"], json({0, 2}));
  EXPECT_EQ(both[0]["args"]["rank"], 0);
  EXPECT_EQ(TrackName(trace, both[0]["tid"]), "sending to rank 0");
  EXPECT_EQ(TrackName(trace, Named(trace, "sent chunk 3")[0]["tid"]), "sending to rank 1");
  EXPECT_EQ(Named(trace, "sent chunk 1").size(), 1u);
}

TEST_F(ChromeTraceTest, IsWholeWithoutEventsAndSaysWhatWasDropped) {
  const json trace = Parse({}, 17);
  EXPECT_EQ(trace["traceEvents"].size(), 1u);
  EXPECT_EQ(trace["otherData"]["dropped_events"], 17);
}

TEST_F(ChromeTraceTest, SurvivesNamesThatAreNotText) {
  JobSpec job = SmallJob("gpt", 1);
  job.layout.parameters[0].name = "\xff\"\n";
  const Layout layout = Layout::Create(job.layout).value();
  ChromeTrace trace("gpt", layout);
  EXPECT_TRUE(json::accept(trace.Head() + trace.Add(ChunkEvent(v1::UPDATED, 1, 0, 1, 2, 0)) +
                           trace.Tail(0)));
}

TEST_F(ChromeTraceTest, ChecksWhatAServiceSays) {
  EXPECT_TRUE(CheckEvent(ChunkEvent(v1::SENT, 1, 4, 1, 1, 0), layout_).ok());
  EXPECT_TRUE(CheckEvent(StepEvent(v1::BEGUN, 1, 1, 1), layout_).ok());
  const auto expect_refused = [&](const v1::TraceEvent& event) {
    EXPECT_TRUE(Refused(CheckEvent(event, layout_), absl::StatusCode::kInvalidArgument));
  };
  expect_refused(ChunkEvent(v1::SENT, 1, 5, 1, 1, 0));
  expect_refused(ChunkEvent(v1::ARRIVED, 1, -1, 1, 1, 0));
  expect_refused(ChunkEvent(v1::ARRIVED, 1, 0, 10, 3, 0));
}

TEST_F(ChromeTraceTest, KnowsItsKindsOfEventsOnly) {
  for (const v1::TraceEventKind kind : {v1::BEGUN, v1::ARRIVED, v1::SENT, v1::COMMITTED}) {
    EXPECT_TRUE(KnowsKind(ChunkEvent(kind, 1, 0, 1, 2, 0)));
  }
  EXPECT_FALSE(KnowsKind(v1::TraceEvent()));
  EXPECT_FALSE(KnowsKind(ChunkEvent(static_cast<v1::TraceEventKind>(99), 1, 0, 1, 2, 0)));
}

}  // namespace
}  // namespace ballast::client::cli
