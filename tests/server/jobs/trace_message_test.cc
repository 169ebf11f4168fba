#include "server/jobs/trace_message.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cpu_optimizer_service/engine.h"

namespace ballast::server {
namespace {

// Two ranks with a chunk each.
std::shared_ptr<Job> TwoChunks(Engine& engine) {
  JobSpec spec;
  spec.name = "job";
  spec.groups = {{.name = "g", .hyper_parameters = {}}};
  spec.layout.world_size = 2;
  spec.layout.parameters = {{.name = "w", .shape = {2 * kBlockElements}}};
  spec.layout.partitions = {
      {.rank = 0, .group = 0, .begin = 0, .end = kBlockElements},
      {.rank = 1, .group = 0, .begin = kBlockElements, .end = 2 * kBlockElements}};
  spec.layout.chunk_elements = kBlockElements;
  return engine.CreateJob(spec).value();
}

std::vector<v1::TraceJobResponse> MessagesOf(const std::shared_ptr<Job>& job, Trace trace) {
  std::vector<v1::TraceJobResponse> messages;
  TraceMessages source(job, std::move(trace));
  v1::TraceJobResponse message;
  while (source.Next(message)) messages.push_back(std::exchange(message, {}));
  EXPECT_FALSE(source.Next(message));
  return messages;
}

class TraceMessageTest : public testing::Test {
 protected:
  Engine engine_{{.memory_limit_bytes = 64 << 20, .threads = 1}};
  std::shared_ptr<Job> job_ = TwoChunks(engine_);
};

TEST_F(TraceMessageTest, TellsEveryEventInOrder) {
  Trace trace;
  const size_t count = 2 * kTraceEventsPerMessage + 1;
  for (size_t i = 0; i < count; ++i) {
    trace.events.push_back({.kind = TraceEventKind::kUpdated,
                            .thread = 7,
                            .chunk = static_cast<int32_t>(i % 2),
                            .step = 3,
                            .begin_ns = static_cast<int64_t>(i),
                            .end_ns = static_cast<int64_t>(i) + 5});
  }
  trace.dropped_events = 9;
  const auto messages = MessagesOf(job_, std::move(trace));
  ASSERT_EQ(messages.size(), 3u);
  EXPECT_EQ(messages[0].dropped_events(), 0u);
  EXPECT_EQ(messages[2].dropped_events(), 9u);
  int64_t next = 0;
  for (const v1::TraceJobResponse& message : messages) {
    EXPECT_LT(message.ByteSizeLong(), size_t{1} << 20);
    for (const v1::TraceEvent& event : message.events()) {
      EXPECT_EQ(event.kind(), v1::UPDATED);
      EXPECT_EQ(event.thread(), 7u);
      EXPECT_EQ(event.step(), 3u);
      EXPECT_EQ(event.chunk(), next % 2);
      EXPECT_EQ(event.rank(), next % 2);
      EXPECT_EQ(event.begin_ns(), next);
      EXPECT_EQ(event.end_ns(), next + 5);
      ++next;
    }
  }
  EXPECT_EQ(next, static_cast<int64_t>(count));
}

TEST_F(TraceMessageTest, NamesEveryKind) {
  const std::vector<std::pair<TraceEventKind, v1::TraceEventKind>> kinds = {
      {TraceEventKind::kArrived, v1::ARRIVED},       {TraceEventKind::kSummed, v1::SUMMED},
      {TraceEventKind::kSpeculated, v1::SPECULATED}, {TraceEventKind::kDecided, v1::DECIDED},
      {TraceEventKind::kUpdated, v1::UPDATED},       {TraceEventKind::kSent, v1::SENT},
      {TraceEventKind::kCommitted, v1::COMMITTED},   {TraceEventKind::kBegun, v1::BEGUN}};
  for (const auto& [kind, expected] : kinds) {
    Trace trace;
    trace.events = {{.kind = kind}};
    const auto messages = MessagesOf(job_, std::move(trace));
    EXPECT_EQ(messages.at(0).events(0).kind(), expected);
    EXPECT_EQ(messages.at(0).events(0).rank(), -1);
  }
}

TEST_F(TraceMessageTest, SendsOneMessageForNothing) { EXPECT_EQ(MessagesOf(job_, {}).size(), 1u); }

}  // namespace
}  // namespace ballast::server
