#include "client/cli/trace_summary.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/client/cli/trace_for_tests.h"
#include "tests/client/job_for_tests.h"

namespace ballast::client::cli {
namespace {

using nlohmann::json;

constexpr int64_t kMs = 1'000'000;

class TraceSummaryTest : public testing::Test {
 protected:
  // Chunk 0 is rank 0's: 256 elements of bf16 each way; chunk 1 is rank 1's.
  void AddStep(TraceSummary& summary, uint64_t step, int64_t begun_ms) {
    const int64_t at = begun_ms * kMs;
    summary.Add(StepEvent(v1::BEGUN, step, at, at));
    summary.Add(ChunkEvent(v1::ARRIVED, step, 0, at, at + kMs, 1));
    summary.Add(ChunkEvent(v1::ARRIVED, step, 1, at, at + kMs, 2));
    summary.Add(ChunkEvent(v1::SUMMED, step, 0, at + kMs, at + 2 * kMs, 1));
    summary.Add(StepEvent(v1::DECIDED, step, at + 2 * kMs, at + 4 * kMs));
    summary.Add(ChunkEvent(v1::UPDATED, step, 0, at + 4 * kMs, at + 7 * kMs, 1));
    summary.Add(ChunkEvent(v1::SENT, step, 0, at + 7 * kMs, at + 8 * kMs, 1));
    summary.Add(StepEvent(v1::COMMITTED, step, at + 9 * kMs, at + 9 * kMs));
  }

  const JobSpec job_ = SmallJob("gpt", 2);
  const Layout layout_ = Layout::Create(job_.layout).value();
};

TEST_F(TraceSummaryTest, SumsUpEveryStep) {
  TraceSummary summary(job_, layout_, {false, false});
  AddStep(summary, 13, 100);
  AddStep(summary, 14, 200);
  EXPECT_EQ(summary.begun(), 2);
  EXPECT_EQ(summary.committed(), 2);
  const json steps = json::parse(summary.ToJson().dump());
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0], json({{"step", 13},
                            {"decided_ms", 4.0},
                            {"committed_ms", 9.0},
                            {"arriving_ms", 2.0},
                            {"summing_ms", 1.0},
                            {"speculating_ms", 0.0},
                            {"deciding_ms", 2.0},
                            {"updating_ms", 3.0},
                            {"sending_ms", 1.0},
                            {"arrived_bytes", 1024},
                            {"sent_bytes", 512}}));
  EXPECT_EQ(
      summary.Text(),
      "step  decided  committed  arriving  summing  speculating  deciding  updating  sending  "
      "MB/s in  MB/s out\n"
      "  13      4.0        9.0       2.0      1.0          0.0       2.0       3.0      1.0  "
      "      1         1\n"
      "  14      4.0        9.0       2.0      1.0          0.0       2.0       3.0      1.0  "
      "      1         1\n");
}

TEST_F(TraceSummaryTest, CountsNoBytesOfRanksThatShareMemory) {
  TraceSummary summary(job_, layout_, {true, false});
  AddStep(summary, 13, 100);
  const json step = json::parse(summary.ToJson().dump())[0];
  EXPECT_EQ(step["arrived_bytes"], 512);
  EXPECT_EQ(step["sent_bytes"], 0);
  EXPECT_EQ(step["sending_ms"], 1.0);
}

TEST_F(TraceSummaryTest, HasARowForEveryAttempt) {
  TraceSummary summary(job_, layout_, {});
  summary.Add(StepEvent(v1::BEGUN, 13, 50 * kMs, 50 * kMs));
  summary.Add(ChunkEvent(v1::ARRIVED, 13, 0, 51 * kMs, 56 * kMs, 1));
  AddStep(summary, 13, 100);
  EXPECT_EQ(summary.begun(), 2);
  EXPECT_EQ(summary.committed(), 1);
  const json steps = json::parse(summary.ToJson().dump());
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_TRUE(steps[0]["decided_ms"].is_null());
  EXPECT_TRUE(steps[0]["committed_ms"].is_null());
  EXPECT_EQ(steps[0]["arriving_ms"], 5.0);
  EXPECT_EQ(steps[1]["arriving_ms"], 2.0);
}

TEST_F(TraceSummaryTest, CountsTheTimeOfAMessageOnceForAllItsChunks) {
  ASSERT_EQ(layout_.chunks()[0].rank, layout_.chunks()[2].rank);
  ASSERT_NE(layout_.chunks()[0].rank, layout_.chunks()[1].rank);
  TraceSummary summary(job_, layout_, {});
  summary.Add(StepEvent(v1::BEGUN, 13, kMs, kMs));
  const auto sent = [&](int chunk, int64_t begin_ms, int64_t end_ms) {
    summary.Add(ChunkEvent(v1::SENT, 13, chunk, begin_ms * kMs, end_ms * kMs, 4));
  };
  sent(0, 1, 3);
  sent(2, 1, 3);  // In the same message.
  sent(1, 1, 3);  // To another rank.
  sent(3, 5, 6);  // Later.
  const json step = json::parse(summary.ToJson().dump())[0];
  EXPECT_EQ(step["sending_ms"], 5.0);
  EXPECT_EQ(step["sent_bytes"], 4 * 512);
}

TEST_F(TraceSummaryTest, ManagesWithoutTheBegin) {
  TraceSummary summary(job_, layout_, {});
  summary.Add(StepEvent(v1::COMMITTED, 13, kMs, kMs));
  EXPECT_EQ(summary.begun(), 0);
  EXPECT_TRUE(json::parse(summary.ToJson().dump())[0]["committed_ms"].is_null());
}

}  // namespace
}  // namespace ballast::client::cli
