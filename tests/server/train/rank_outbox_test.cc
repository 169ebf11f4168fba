#include "server/train/rank_outbox.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "cpu_optimizer_service/engine.h"
#include "proto/frame.h"

namespace ballast::server {
namespace {

constexpr int kChunks = 10;
constexpr int kManyChunks = 96;  // Three of them, in place, make a message.

// Keeps what was started; the test decides when it is done.
class FakeWire : public RankWire {
 public:
  void Read() override { ++reads; }
  void Write(const grpc::ByteBuffer& bytes) override {
    EXPECT_FALSE(writing);
    EXPECT_FALSE(finished);
    writing = true;
    last = proto::ParseTrainResponse(bytes).value();
    ++writes;
  }
  void Finish(const absl::Status& status) override {
    EXPECT_FALSE(writing);
    EXPECT_FALSE(finished);
    finished = status;
  }

  int reads = 0;
  int writes = 0;
  bool writing = false;
  proto::Frame<v1::TrainResponse> last;
  std::optional<absl::Status> finished;
};

JobSpec OneRank(const std::string& name, int chunks) {
  JobSpec spec;
  spec.name = name;
  spec.groups = {{.name = "g", .hyper_parameters = {}}};
  spec.layout.parameters = {{.name = "w", .shape = {chunks * kBlockElements}}};
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = chunks * kBlockElements}};
  spec.layout.chunk_elements = kBlockElements;
  return spec;
}

// Counts who still has it.
class HeapMemory : public RankMemory {
 public:
  absl::Span<const std::byte> gradient(int) const override { return {}; }
  absl::Span<std::byte> weights(int) const override { return absl::MakeSpan(bytes_); }

 private:
  mutable std::vector<std::byte> bytes_ = std::vector<std::byte>(512);
};

class RankOutboxTest : public testing::Test {
 protected:
  void SetUp() override {
    job_ = engine_.CreateJob(OneRank("job", kChunks)).value();
    const std::vector<float> ones(kBlockElements, 1.0f);
    const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(ones.data()),
                                            ones.size() * sizeof(float));
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ASSERT_TRUE(job_->WriteInitialWeights(chunk, {bytes}).ok());
    }
  }

  // The first message, its acknowledgement included.
  void Open() { Open(job_); }
  void OpenWithManyChunks() { Open(engine_.CreateJob(OneRank("large", kManyChunks)).value()); }
  void Open(const std::shared_ptr<Job>& job) {
    outbox_.MessageBegins();
    outbox_.Opened(job, 0,
                   RankPosition{.generation = job_->Status().generation, .committed_step = 3});
    outbox_.MessageDone();
    WriteDone();
    WriteDone();
    ASSERT_EQ(wire_.writes, 2);
    ASSERT_FALSE(wire_.writing);
  }

  void Receive() {
    outbox_.MessageBegins();
    outbox_.MessageDone();
  }

  void WriteDone() {
    ASSERT_TRUE(wire_.writing);
    wire_.writing = false;
    wire_.last = {};
    outbox_.WriteDone(true);
  }

  // As if updated there.
  void TellInPlace(uint64_t step, int chunk) {
    outbox_.OnWeights(step, chunk, WeightBuffer::InPlace(memory_, chunk));
  }
  void TellProvisionalInPlace(uint64_t step, int chunk) {
    outbox_.OnProvisionalWeights(step, chunk, WeightBuffer::InPlace(memory_, chunk));
  }
  std::vector<int> ToldChunks() const {
    const auto& chunks = wire_.last.message.shared_weights().chunks();
    return {chunks.begin(), chunks.end()};
  }

  void Decide(uint64_t step) { outbox_.OnDecision(StepOutcome{.step = step}, {}); }

  Engine engine_{{.memory_limit_bytes = 64 << 20, .threads = 1}};
  std::shared_ptr<Job> job_;
  const std::shared_ptr<RankMemory> memory_ = std::make_shared<HeapMemory>();
  FakeWire wire_;
  RankOutbox outbox_{wire_};
};

TEST_F(RankOutboxTest, SendsOpenedBeforeWhatTheEngineSaidEarlier) {
  outbox_.MessageBegins();
  Decide(4);
  EXPECT_EQ(wire_.writes, 0);
  outbox_.Opened(job_, 0, RankPosition{.committed_step = 3, .delivered = {{.chunk = 2}}});
  EXPECT_EQ(wire_.last.message.opened().committed_step(), 3);
  EXPECT_EQ(wire_.last.message.opened().delivered(0).chunk(), 2);
  outbox_.MessageDone();
  WriteDone();
  EXPECT_EQ(wire_.last.message.acknowledged().messages(), 1);
  WriteDone();
  EXPECT_EQ(wire_.last.message.decision().step(), 4);
}

TEST_F(RankOutboxTest, NamesChunksOfADecisionBeforeOpenedAsTheRankDoes) {
  JobSpec spec;
  spec.name = "mesh";
  spec.groups = {{.name = "g", .hyper_parameters = {}}};
  spec.layout.world_size = 2;
  spec.layout.mesh = {{.name = "dp", .size = 2}};
  spec.layout.parameters = {
      {.name = "w", .shape = {4 * kBlockElements}, .placements = {{.shard_dim = 0}}}};
  spec.layout.chunk_elements = kBlockElements;
  const std::shared_ptr<Job> job = engine_.CreateJob(spec).value();
  const std::vector<int> dropped = {job->layout().first_of_rank(1)};
  ASSERT_EQ(dropped, std::vector<int>{2});
  outbox_.MessageBegins();
  outbox_.OnDecision(StepOutcome{.step = 4}, dropped);
  outbox_.Opened(job, 1, RankPosition{.committed_step = 3});
  outbox_.MessageDone();
  WriteDone();
  WriteDone();
  ASSERT_EQ(wire_.last.message.decision().step(), 4);
  EXPECT_EQ(wire_.last.message.decision().dropped_chunks(0), 0);
}

TEST_F(RankOutboxTest, AcknowledgesAllThatIsDueWithOneMessage) {
  Open();
  Receive();
  EXPECT_EQ(wire_.last.message.acknowledged().messages(), 2);
  for (int i = 0; i < 50; ++i) Receive();
  EXPECT_EQ(wire_.writes, 3);
  WriteDone();
  EXPECT_EQ(wire_.last.message.acknowledged().messages(), 52);
  WriteDone();
  EXPECT_EQ(wire_.writes, 4);
}

TEST_F(RankOutboxTest, LetsAcknowledgementsAndTheQueueTakeTurns) {
  Open();
  Receive();
  Decide(4);
  Decide(5);
  for (const bool acknowledgement : {true, false, true, false}) {
    EXPECT_EQ(wire_.last.message.has_acknowledged(), acknowledgement);
    Receive();
    WriteDone();
  }
}

TEST_F(RankOutboxTest, ReadsNoMoreWhileItsQueueIsFull) {
  Open();
  Receive();
  const int reads = wire_.reads;
  // The write does not end: the worker does not read.
  int queued = 0;
  while (wire_.reads == reads + queued) {
    ASSERT_LT(queued, 1000);
    Decide(4);
    Receive();
    ++queued;
  }
  EXPECT_GE(queued, kChunks);
  const int paused_at = wire_.reads;
  WriteDone();  // Now the first of the queue is on its way, and there is room for one more.
  WriteDone();
  EXPECT_EQ(wire_.reads, paused_at + 1);
  WriteDone();
  EXPECT_EQ(wire_.reads, paused_at + 1);
}

// Few messages may be large: they name parameters.
TEST_F(RankOutboxTest, ReadsNoMoreWhileItsQueueHasManyBytes) {
  Open();
  const SealRefusal refusal = {
      .status = absl::FailedPreconditionError("missing"),
      .missing = {{.rank = 0, .micro_step = 0, .parameters = {std::string(200'000, 'p')}}}};
  Receive();  // Its acknowledgement is being written, and stays.
  const int reads = wire_.reads;
  int taken = 0;
  for (; wire_.reads == reads + taken && taken < 100; ++taken) {
    outbox_.OnSealRefused(4, refusal);
    Receive();
  }
  EXPECT_EQ(taken, 6) << "a MiB, of 200 KB each";
  for (int message = 0; message < taken + 1; ++message) WriteDone();
  EXPECT_EQ(wire_.reads, reads + taken);
}

TEST_F(RankOutboxTest, ReadsWeightsThatFoundNoBufferWhenTheirTurnComes) {
  Open();
  outbox_.OnWeights(0, 7, WeightBuffer());
  EXPECT_EQ(wire_.last.message.weights().header().chunk(), 7);
  std::vector<uint16_t> sent(kBlockElements);
  ASSERT_EQ(wire_.last.payload.size_bytes(), 2 * kBlockElements);
  wire_.last.payload.CopyTo(reinterpret_cast<std::byte*>(sent.data()));
  EXPECT_THAT(sent, testing::Each(0x3f80));  // 1.0 in bf16.
}

TEST_F(RankOutboxTest, AnswersADiscardAfterTheWeightsThatItVoids) {
  OpenWithManyChunks();
  outbox_.Sealing(4);
  TellProvisionalInPlace(4, 0);  // At once, since the worker only waits.
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(0));
  TellProvisionalInPlace(4, 1);
  outbox_.Discarded({4, 2});
  WriteDone();
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(1));
  WriteDone();
  EXPECT_EQ(wire_.last.message.discarded().step(), 4u);
  EXPECT_EQ(wire_.last.message.discarded().attempt(), 2u);
  WriteDone();
  TellProvisionalInPlace(4, 1);  // Of the next attempt; the worker has not sealed that.
  EXPECT_FALSE(wire_.writing);
}

TEST_F(RankOutboxTest, MarksProvisionalWeightsAndNamesThoseThatAreDropped) {
  Open();
  const auto pool = WeightBufferPool::Create(2 * kBlockElements, 2);
  for (const int chunk : {7, 3}) {
    outbox_.OnProvisionalWeights(4, chunk, pool->TryTake(2 * kBlockElements));
  }
  outbox_.OnDecision(StepOutcome{.step = 4}, {3});
  outbox_.OnWeights(0, 3, WeightBuffer());
  for (const int chunk : {7, 3}) {
    EXPECT_TRUE(wire_.last.message.weights().header().provisional());
    EXPECT_EQ(wire_.last.message.weights().header().chunk(), chunk);
    EXPECT_EQ(wire_.last.message.weights().header().step(), 4);
    WriteDone();
  }
  ASSERT_EQ(wire_.last.message.decision().dropped_chunks_size(), 1);
  EXPECT_EQ(wire_.last.message.decision().dropped_chunks(0), 3);
  WriteDone();
  EXPECT_EQ(wire_.last.message.weights().header().chunk(), 3);
  EXPECT_FALSE(wire_.last.message.weights().header().provisional());
}

TEST_F(RankOutboxTest, EndsWhenWeightsAreGoneBeforeTheirTurn) {
  Open();
  outbox_.OnWeights(99, 7, WeightBuffer());
  ASSERT_TRUE(wire_.finished.has_value());
  EXPECT_EQ(wire_.finished->code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(RankOutboxTest, EndsWhenWeightsAreOfAnotherGeneration) {
  Open();
  ASSERT_TRUE(job_->Attach({.rank = 0, .process_id = "p"}).ok());
  ASSERT_TRUE(job_->Attach({.rank = 0, .process_id = "another"}).ok());
  outbox_.OnWeights(0, 7, WeightBuffer());
  ASSERT_TRUE(wire_.finished.has_value());
  EXPECT_EQ(wire_.finished->code(), absl::StatusCode::kAborted);
}

TEST_F(RankOutboxTest, KeepsOnlyTheLastReminder) {
  Open();
  Decide(4);  // On its way; the worker does not read.
  outbox_.OnWaiting(5, {1}, "");
  Decide(5);
  for (int i = 0; i < 1000; ++i) outbox_.OnWaiting(6, {1, 2}, "");
  outbox_.OnWaiting(6, {2}, "why");
  WriteDone();
  EXPECT_EQ(wire_.last.message.decision().step(), 5);
  WriteDone();
  EXPECT_EQ(wire_.last.message.waiting().step(), 6);
  EXPECT_THAT(wire_.last.message.waiting().ranks(), testing::ElementsAre(2));
  EXPECT_EQ(wire_.last.message.waiting().why(), "why");
  const int writes = wire_.writes;
  WriteDone();
  EXPECT_EQ(wire_.writes, writes);
}

TEST_F(RankOutboxTest, SendsPoolBuffersInPlaceAndGivesThemBack) {
  Open();
  const auto pool = WeightBufferPool::Create(512, 1);
  WeightBuffer buffer = pool->TryTake(512);
  const std::byte* data = buffer.data();
  outbox_.OnWeights(3, 1, std::move(buffer));
  ASSERT_EQ(wire_.last.payload.pieces().size(), 1);
  EXPECT_EQ(wire_.last.payload.pieces()[0].data(), data);
  EXPECT_FALSE(pool->TryTake(512));
  WriteDone();
  EXPECT_TRUE(pool->TryTake(512));
}

TEST_F(RankOutboxTest, CountsAMessageOfManyChunksAsMany) {
  Open();
  outbox_.MessageBegins();
  outbox_.MessageDone(5);
  EXPECT_EQ(wire_.last.message.acknowledged().messages(), 6);
}

TEST_F(RankOutboxTest, TellsWeightsInPlaceThatWaitInOneMessage) {
  Open();
  Decide(4);  // On its way.
  for (const int chunk : {3, 1, 2}) TellInPlace(4, chunk);
  outbox_.OnWeights(0, 7, WeightBuffer());  // Not in place.
  TellInPlace(4, 5);
  outbox_.OnCommitted(4, 0.5, "");
  WriteDone();
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(3, 1, 2));
  EXPECT_EQ(wire_.last.message.shared_weights().step(), 4);
  EXPECT_FALSE(wire_.last.message.shared_weights().provisional());
  EXPECT_EQ(wire_.last.payload.size_bytes(), 0);
  WriteDone();
  EXPECT_EQ(wire_.last.message.weights().header().chunk(), 7);
  WriteDone();
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(5));
  WriteDone();
  EXPECT_EQ(wire_.last.message.committed().step(), 4);
  WriteDone();
  EXPECT_EQ(memory_.use_count(), 1);  // It keeps no part of the memory.
}

TEST_F(RankOutboxTest, KeepsWeightsInPlaceOfDifferentStepsAndKindsApart) {
  Open();
  Decide(3);  // On its way.
  TellProvisionalInPlace(3, 1);
  TellInPlace(3, 1);
  TellProvisionalInPlace(4, 1);
  TellProvisionalInPlace(4, 2);
  outbox_.OnDecision(StepOutcome{.step = 4}, {2});
  TellInPlace(4, 2);
  for (const bool provisional : {true, false}) {
    WriteDone();
    EXPECT_THAT(ToldChunks(), testing::ElementsAre(1));
    EXPECT_EQ(wire_.last.message.shared_weights().step(), 3);
    EXPECT_EQ(wire_.last.message.shared_weights().provisional(), provisional);
  }
  WriteDone();
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(1, 2));
  EXPECT_TRUE(wire_.last.message.shared_weights().provisional());
  WriteDone();
  EXPECT_EQ(wire_.last.message.decision().dropped_chunks(0), 2);
  WriteDone();
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(2));
  EXPECT_FALSE(wire_.last.message.shared_weights().provisional());
}

TEST_F(RankOutboxTest, HoldsWeightsInPlaceBackUntilTheyAreEnoughOrSomethingFollows) {
  OpenWithManyChunks();
  const int writes = wire_.writes;
  TellInPlace(4, 1);
  TellInPlace(4, 2);
  EXPECT_EQ(wire_.writes, writes);
  Receive();  // An acknowledgement does not wait for them.
  EXPECT_TRUE(wire_.last.message.has_acknowledged());
  WriteDone();
  EXPECT_EQ(wire_.writes, writes + 1);
  TellInPlace(4, 3);
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(1, 2, 3));
  WriteDone();
  TellInPlace(4, 4);
  EXPECT_EQ(wire_.writes, writes + 2);
  outbox_.OnCommitted(4, 0.5, "");
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(4));
  WriteDone();
  EXPECT_TRUE(wire_.last.message.has_committed());
  WriteDone();
  // Two kinds, and too few of each for a message: the first is sent, because no more of it can
  // follow.
  TellProvisionalInPlace(5, 1);
  EXPECT_EQ(wire_.writes, writes + 4);
  TellProvisionalInPlace(6, 1);
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(1));
  EXPECT_EQ(wire_.last.message.shared_weights().step(), 5);
}

TEST_F(RankOutboxTest, HoldsNoProvisionalWeightsBackWhileTheirStepIsSealed) {
  OpenWithManyChunks();
  TellProvisionalInPlace(5, 1);
  EXPECT_FALSE(wire_.writing);
  outbox_.Sealing(5);
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(1));
  WriteDone();
  TellProvisionalInPlace(5, 2);
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(2));
  WriteDone();
  outbox_.OnSealRefused(5, {});
  WriteDone();
  TellProvisionalInPlace(5, 3);
  EXPECT_FALSE(wire_.writing);
  outbox_.Sealing(5);
  WriteDone();
  Decide(5);
  WriteDone();
  TellInPlace(5, 4);  // After the decision they come fast.
  EXPECT_FALSE(wire_.writing);
}

TEST_F(RankOutboxTest, TellsWhatItHeldBackWhenTheWorkerHasClosedItsSide) {
  OpenWithManyChunks();
  TellInPlace(4, 1);
  outbox_.MessageBegins();
  outbox_.NoMoreMessages();
  EXPECT_THAT(ToldChunks(), testing::ElementsAre(1));
  EXPECT_FALSE(wire_.finished.has_value());
  WriteDone();
  EXPECT_EQ(wire_.finished, absl::OkStatus());
}

TEST_F(RankOutboxTest, LetsGoOfWhatItHeldBackWhenItIsDetached) {
  OpenWithManyChunks();
  TellInPlace(4, 1);
  outbox_.OnDetached(absl::AbortedError("replaced"));
  EXPECT_EQ(memory_.use_count(), 1);
  EXPECT_EQ(wire_.finished, absl::AbortedError("replaced"));
}

TEST_F(RankOutboxTest, GivesPoolBuffersBackWhenItIsDetached) {
  Open();
  Decide(4);  // On its way.
  const auto pool = WeightBufferPool::Create(512, 1);
  outbox_.OnWeights(3, 1, pool->TryTake(512));
  outbox_.OnDetached(absl::AbortedError("replaced"));
  EXPECT_TRUE(pool->TryTake(512));
  EXPECT_FALSE(wire_.finished.has_value());  // Not before the write is done.
  WriteDone();
  EXPECT_EQ(wire_.finished, absl::AbortedError("replaced"));
  Decide(5);  // Dropped.
  outbox_.Cancelled();
  EXPECT_EQ(wire_.writes, 3);
}

TEST_F(RankOutboxTest, EndsOnlyWhenTheMessageInHandIsDone) {
  Open();
  outbox_.MessageBegins();
  outbox_.OnDetached(absl::AbortedError("replaced"));
  EXPECT_FALSE(wire_.finished.has_value());
  const int reads = wire_.reads;
  outbox_.MessageDone();
  EXPECT_EQ(wire_.finished, absl::AbortedError("replaced"));
  EXPECT_EQ(wire_.reads, reads);
}

TEST_F(RankOutboxTest, SendsWhatIsQueuedAfterTheWorkerClosedItsSide) {
  Open();
  Decide(4);
  Decide(5);
  outbox_.MessageBegins();
  outbox_.NoMoreMessages();
  EXPECT_FALSE(wire_.finished.has_value());
  WriteDone();
  EXPECT_EQ(wire_.last.message.decision().step(), 5);
  WriteDone();
  EXPECT_EQ(wire_.finished, absl::OkStatus());
}

// Writes that another thread ends, as gRPC does.
class WireOfAnotherThread : public RankWire {
 public:
  void Read() override {}
  void Write(const grpc::ByteBuffer& bytes) override {
    const v1::TrainResponse message = proto::ParseTrainResponse(bytes).value().message;
    acknowledged = std::max(acknowledged, message.acknowledged().messages());
    ++writes;
    writing = true;
  }
  void Finish(const absl::Status&) override {}

  uint64_t acknowledged = 0;  // Belongs to the write in progress.
  std::atomic<int> writes = 0;
  std::atomic<bool> writing = false;
};

TEST_F(RankOutboxTest, TakesMessagesAndEndsOfWritesFromTwoThreads) {
  constexpr int kWrites = 2000;
  WireOfAnotherThread wire;
  RankOutbox outbox(wire);
  std::atomic<bool> last_message_sent = false;
  std::thread writer([&] {
    while (!last_message_sent || wire.writing) {
      if (wire.writing.exchange(false)) {
        outbox.WriteDone(true);
      } else {
        std::this_thread::yield();
      }
    }
  });
  outbox.MessageBegins();
  outbox.Opened(job_, 0, RankPosition());
  outbox.MessageDone();
  uint64_t messages = 1;
  for (; wire.writes < kWrites; ++messages) {
    outbox.MessageBegins();
    outbox.MessageDone();
  }
  last_message_sent = true;
  writer.join();
  EXPECT_EQ(wire.acknowledged, messages);
}

TEST_F(RankOutboxTest, EndsWithTheErrorOfAMessage) {
  outbox_.MessageBegins();
  outbox_.MessageFailed(absl::InvalidArgumentError("no"));
  EXPECT_EQ(wire_.finished, absl::InvalidArgumentError("no"));
  EXPECT_EQ(wire_.writes, 0);
}

TEST_F(RankOutboxTest, RecordsWhenWeightsHaveGoneForATrace) {
  Open();
  TraceRecorder& trace = job_->trace();
  ASSERT_TRUE(trace.Start(/*first_step=*/4, /*steps=*/1, /*max_events=*/100).ok());
  const auto pool = WeightBufferPool::Create(512, 2);
  outbox_.OnProvisionalWeights(4, 1, pool->TryTake(512));
  outbox_.OnProvisionalWeights(4, 2, pool->TryTake(512));
  Decide(4);
  const int64_t first_written_ns = TraceNow();
  WriteDone();
  EXPECT_FALSE(trace.all_sent());
  WriteDone();
  EXPECT_TRUE(trace.all_sent());
  WriteDone();
  const Trace sent = trace.Stop();
  ASSERT_EQ(sent.events.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(sent.events[i].kind, TraceEventKind::kSent);
    EXPECT_EQ(sent.events[i].step, 4u);
    EXPECT_EQ(sent.events[i].chunk, 1 + i);
  }
  // From its turn, not from when it was queued, to the end of its write.
  EXPECT_LT(sent.events[0].begin_ns, first_written_ns);
  EXPECT_GE(sent.events[0].end_ns, first_written_ns);
  EXPECT_GE(sent.events[1].begin_ns, sent.events[0].end_ns);
}

}  // namespace
}  // namespace ballast::server
