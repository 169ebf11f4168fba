// A job whose ranks orthogonalize the directions of Muon's matrices. Histories play its deaths.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rule.h"
#include "tests/cpu_optimizer_service/job/muon_job_test.h"
#include "tests/cpu_optimizer_service/job/outcome.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class JobDirectionsTest : public MuonJobTest {
 protected:
  static JobSpec Spec(bool keep_previous = false) {
    JobSpec spec = MatricesSpec(/*bucket_elements=*/512);
    spec.newton_schulz = Orthogonalizer::kWorkers;
    spec.keep_previous = keep_previous;
    return spec;
  }
  static uint64_t SealAll(JobDriver& driver, uint64_t seed) {
    const uint64_t step = driver.next_step();
    driver.BeginAll();
    driver.SendAll(seed, 0, /*final=*/true);
    driver.EndMicroStepAll(0);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_FALSE(driver.stream(rank).Seal(step, 1).value().has_value());
    }
    return step;
  }
  // Up to the directions of the next step.
  static uint64_t StepToDirections(JobDriver& driver, uint64_t seed) {
    const uint64_t step = SealAll(driver, seed);
    for (int rank = 0; rank < 2; ++rank) driver.listener(rank).WaitForDirections(step);
    return step;
  }
  static RankHolder HolderOf(JobDriver& driver, int rank) {
    return {.rank = rank,
            .process_id = "process" + std::to_string(rank),
            .generation = driver.job().Position().generation};
  }
  static std::vector<int> ChunksOf(JobDriver& driver, int rank) {
    const absl::Span<const int> all = driver.layout().chunks_of_rank(rank);
    std::vector<int> chunks(all.begin(), all.end());
    std::erase_if(chunks, [&](int chunk) { return driver.layout().chunks()[chunk].group != 0; });
    return chunks;
  }
  static std::vector<std::byte> Directions(JobDriver& driver, uint64_t step, int chunk) {
    std::vector<std::byte> bytes(driver.layout().chunks()[chunk].elements * 2);
    EXPECT_TRUE(driver.job().ReadDirections(step, chunk, absl::MakeSpan(bytes)).ok());
    return bytes;
  }
  static absl::Status Give(JobDriver& driver, uint64_t step, int rank, int chunk,
                           const std::vector<std::byte>& bytes) {
    const absl::Span<const std::byte> piece(bytes);
    return driver.job().GiveOrthogonal(HolderOf(driver, rank), step, chunk, {&piece, 1});
  }
  // As if they were orthogonal already.
  static void GiveAll(JobDriver& driver, uint64_t step, int rank) {
    for (const int chunk : ChunksOf(driver, rank)) {
      ASSERT_TRUE(Give(driver, step, rank, chunk, Directions(driver, step, chunk)).ok());
    }
  }
  static void WholeStep(JobDriver& driver, uint64_t seed) {
    const uint64_t step = StepToDirections(driver, seed);
    for (int rank = 0; rank < 2; ++rank) GiveAll(driver, step, rank);
    for (int rank = 0; rank < 2; ++rank) driver.listener(rank).WaitForCommit(step);
  }
  static JobSpec ByService() {
    JobSpec spec = Spec();
    spec.name = "by_service";
    spec.newton_schulz = Orthogonalizer::kService;
    return spec;
  }
  // Of a job whose service makes O.
  static void StepOf(JobDriver& driver, uint64_t seed) {
    const uint64_t step = SealAll(driver, seed);
    for (int rank = 0; rank < 2; ++rank) driver.listener(rank).WaitForCommit(step);
  }
  static StepRecord LastRecord(JobDriver& driver) {
    return driver.job().Status().recent_steps.back();
  }
};

TEST_F(JobDirectionsTest, TheRoundWaitsForEachRankAndNamesIt) {
  JobDriver driver = Make(Spec());
  const uint64_t step = StepToDirections(driver, 3);
  driver.job().TellWaiting();
  EXPECT_TRUE(driver.listener(0).waiting().empty());  // Nobody waits yet.
  EXPECT_FALSE(driver.job().SecondsSinceFirstSeal().has_value());
  Outcome<Snapshot> read;
  driver.job().TakeSnapshot({0}, read.done());
  GiveAll(driver, step, 0);
  driver.job().TellWaiting();
  EXPECT_EQ(driver.listener(0).waiting(), std::vector<int>{1});
  EXPECT_TRUE(driver.job().SecondsSinceFirstSeal().has_value());
  const JobStatus status = driver.job().Status();
  EXPECT_EQ(status.phase, JobPhase::kDirections);
  EXPECT_EQ(status.committed_step, step);
  EXPECT_EQ(LastRecord(driver).outcome.step, step);
  EXPECT_FALSE(status.ranks[0].orthogonalizes);
  EXPECT_TRUE(status.ranks[1].orthogonalizes);
  EXPECT_FALSE(read.ready());
  GiveAll(driver, step, 1);
  driver.listener(0).WaitForCommit(step);
  EXPECT_TRUE(read.Get().ok());
  EXPECT_EQ(LastRecord(driver).outcome.left, "");
  EXPECT_EQ(driver.job().Status().applied_steps, 1u);
  // A repetition after the end.
  const std::vector<std::byte> any(driver.layout().chunks()[ChunksOf(driver, 1)[0]].elements * 2);
  EXPECT_TRUE(Give(driver, step, 1, ChunksOf(driver, 1)[0], any).ok());
}

// A rank's memory whose weights' place is slow to come once.
class SlowRankMemory final : public RankMemory {
 public:
  explicit SlowRankMemory(const RankMemory& real) : real_(real) {}
  absl::Span<const std::byte> gradient(int chunk) const override { return real_.gradient(chunk); }
  absl::Span<std::byte> weights(int chunk) const override {
    if (armed_.exchange(false)) {
      asked_.release();
      released_.acquire();
    }
    return real_.weights(chunk);
  }
  void Arm() { armed_ = true; }
  void AwaitAsked() { asked_.acquire(); }
  void Release() { released_.release(); }

 private:
  const RankMemory& real_;
  mutable std::atomic<bool> armed_ = false;
  mutable std::binary_semaphore asked_{0};
  mutable std::binary_semaphore released_{0};
};

// They have the same place, and the last to come must be the weights.
TEST_F(JobDirectionsTest, WeightsWaitForDirectionsThatAreBeingShared) {
  for (const bool aborts : {false, true}) {
    JobSpec spec = Spec();
    spec.name = aborts ? "aborted" : "given";
    JobDriver driver(engine_, spec);
    driver.UploadWeights();
    driver.SetSending(Sending::kInPlace);
    driver.AttachAll();
    const auto slow = std::make_shared<SlowRankMemory>(driver.memory(0));
    ASSERT_TRUE(driver.job().GiveRankMemory(HolderOf(driver, 0), slow).ok());
    const uint64_t step = StepToDirections(driver, 3);
    const int chunk = ChunksOf(driver, 0)[0];
    slow->Arm();
    std::thread sharing(
        [&] { EXPECT_TRUE(driver.job().ShareDirections(step, chunk, "process0").value()); });
    slow->AwaitAsked();
    if (aborts) {
      EXPECT_TRUE(driver.job().AbortStep().ok());
    } else {
      for (int rank = 0; rank < 2; ++rank) GiveAll(driver, step, rank);
    }
    EXPECT_EQ(driver.job().Status().phase, JobPhase::kDirections);
    slow->Release();
    sharing.join();
    for (int rank = 0; rank < 2; ++rank) driver.listener(rank).WaitForCommit(step);
    std::vector<std::byte> weights(slow->weights(chunk).size());
    const Generation generation = driver.job().Position().generation;
    ASSERT_TRUE(driver.job().ReadShard(generation, step, chunk, absl::MakeSpan(weights)).ok());
    EXPECT_TRUE(std::ranges::equal(weights, slow->weights(chunk)));
  }
}

// Directions where the weights will be, O where the gradients were.
TEST_F(JobDirectionsTest, MemoryThatIsSharedTakesBothWays) {
  JobSpec plain_spec = Spec();
  plain_spec.name = "plain";
  JobDriver plain = Make(plain_spec);
  WholeStep(plain, 3);
  JobDriver driver(engine_, Spec());
  driver.UploadWeights();
  driver.SetSending(Sending::kInPlace);
  driver.AttachAll();
  const uint64_t step = StepToDirections(driver, 3);
  for (int rank = 0; rank < 2; ++rank) {
    const std::string holder = HolderOf(driver, rank).process_id;
    for (const int chunk : ChunksOf(driver, rank)) {
      EXPECT_FALSE(driver.job().ShareDirections(step, chunk, "another process").value());
      ASSERT_TRUE(driver.job().ShareDirections(step, chunk, holder).value());
      const std::vector<std::byte> directions = Directions(driver, step, chunk);
      const absl::Span<const std::byte> place = driver.memory(rank).weights(chunk);
      EXPECT_TRUE(std::ranges::equal(directions, place.subspan(0, directions.size())));
      driver.memory(rank).WriteGradient(chunk, directions);
      ASSERT_TRUE(driver.job().GiveOrthogonal(HolderOf(driver, rank), step, chunk, {}).ok());
    }
  }
  for (int rank = 0; rank < 2; ++rank) driver.listener(rank).WaitForCommit(step);
  EXPECT_EQ(driver.job().StateHash(), plain.job().StateHash());
  for (const int chunk : ChunksOf(driver, 0)) {
    std::vector<std::byte> weights(driver.memory(0).weights(chunk).size());
    const Generation generation = driver.job().Position().generation;
    ASSERT_TRUE(driver.job().ReadShard(generation, step, chunk, absl::MakeSpan(weights)).ok());
    EXPECT_TRUE(std::ranges::equal(weights, driver.memory(0).weights(chunk)));
  }
}

TEST_F(JobDirectionsTest, WhatCannotBeTakenIsRefused) {
  JobDriver driver = Make(Spec());
  const uint64_t step = StepToDirections(driver, 3);
  const int own = ChunksOf(driver, 0)[0];
  const int foreign = ChunksOf(driver, 1)[0];
  const int of_adamw = static_cast<int>(driver.layout().chunks().size()) - 1;
  std::vector<std::byte> bytes = Directions(driver, step, own);
  EXPECT_TRUE(Refused(Give(driver, step, 0, foreign, bytes), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Give(driver, step, 0, of_adamw, bytes), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Give(driver, step, 0, -1, bytes), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Give(driver, step + 1, 0, own, bytes), absl::StatusCode::kFailedPrecondition,
                      reason::kOtherStep));
  EXPECT_TRUE(Refused(driver.job().ReadDirections(step, of_adamw, absl::MakeSpan(bytes)),
                      absl::StatusCode::kFailedPrecondition, reason::kOtherStep));
  EXPECT_FALSE(driver.job().ShareDirections(step, own, "process0").value());
  EXPECT_TRUE(Refused(driver.job().GiveOrthogonal(HolderOf(driver, 0), step, own, {}),
                      absl::StatusCode::kUnavailable));
  const absl::Span<const std::byte> piece(bytes);
  RankHolder older = HolderOf(driver, 0);
  older.generation.count = 0;
  EXPECT_TRUE(Refused(driver.job().GiveOrthogonal(older, step, own, {&piece, 1}),
                      absl::StatusCode::kAborted, reason::kOlderGeneration));
  bytes.pop_back();
  EXPECT_TRUE(Refused(Give(driver, step, 0, own, bytes), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(driver.stream(0).BeginStep({step + 1, 0}, {}),
                      absl::StatusCode::kFailedPrecondition, reason::kOtherStep));
  // A client that does not know directions.
  EXPECT_TRUE(Refused(driver.job().OpenStream({.uid = driver.job().uid(),
                                               .rank = 0,
                                               .process_id = "process0",
                                               .generation = driver.job().Position().generation},
                                              std::make_shared<RecordingListener>()),
                      absl::StatusCode::kFailedPrecondition));
  for (int rank = 0; rank < 2; ++rank) GiveAll(driver, step, rank);
  driver.listener(0).WaitForCommit(step);
  EXPECT_EQ(LastRecord(driver).outcome.left, "");
}

TEST_F(JobDirectionsTest, AMatrixWhoseOIsNotFiniteIsLeft) {
  JobDriver driver = Make(Spec());
  const std::vector<float> first = Read(driver, 0, Plane::kMaster);
  const std::vector<float> second = Read(driver, 1, Plane::kMaster);
  const uint64_t step = StepToDirections(driver, 3);
  for (int rank = 0; rank < 2; ++rank) {
    for (const int chunk : ChunksOf(driver, rank)) {
      std::vector<std::byte> bytes = Directions(driver, step, chunk);
      driver.layout().VisitParts(chunk, [&](const ChunkPart& part) {
        const uint16_t infinity = 0x7f80;
        if (part.parameter == 1) std::memcpy(bytes.data() + 2 * part.chunk_offset, &infinity, 2);
        return true;
      });
      ASSERT_TRUE(Give(driver, step, rank, chunk, bytes).ok());
    }
  }
  driver.listener(0).WaitForCommit(step);
  EXPECT_TRUE(Says(LastRecord(driver).outcome.left));
  EXPECT_EQ(driver.listener(0).left(), LastRecord(driver).outcome.left);
  EXPECT_NE(Read(driver, 0, Plane::kMaster), first);
  EXPECT_EQ(Read(driver, 1, Plane::kMaster), second);
}

TEST_F(JobDirectionsTest, AfterAnAbortTheServiceMakesO) {
  JobDriver driver = Make(Spec());
  JobDriver by_service = Make(ByService());
  const uint64_t step = StepToDirections(driver, 3);
  GiveAll(driver, step, 0);
  EXPECT_EQ(driver.job().AbortStep().value(), step);
  const int chunk = ChunksOf(driver, 1)[0];  // Late, and of no use.
  const std::vector<std::byte> zeros(driver.layout().chunks()[chunk].elements * 2);
  EXPECT_TRUE(Give(driver, step, 1, chunk, zeros).ok());
  driver.listener(0).WaitForCommit(step);
  EXPECT_EQ(driver.listener(0).left(), "");
  StepOf(by_service, 3);
  EXPECT_EQ(driver.job().StateHash(), by_service.job().StateHash());
  WholeStep(driver, 4);
}

TEST_F(JobDirectionsTest, AStepCanBeUndoneInItsSecondRound) {
  JobDriver driver = Make(Spec(/*keep_previous=*/true));
  WholeStep(driver, 3);
  const std::string before = driver.job().StateHash();
  const uint64_t step = StepToDirections(driver, 4);
  GiveAll(driver, step, 1);
  EXPECT_EQ(driver.job().UndoStep().value(), step);
  EXPECT_EQ(driver.job().StateHash(), before);
  EXPECT_EQ(LastRecord(driver).outcome.step, step - 1);
  driver.AttachAll();
  WholeStep(driver, 5);
  EXPECT_NE(driver.job().StateHash(), before);
  EXPECT_EQ(driver.job().Status().applied_steps, 2u);
}

TEST_F(JobDirectionsTest, ForASaveWithoutRanksTheServiceMakesOAndALoadNeedsNone) {
  JobDriver driver = Make(Spec());
  JobDriver by_service = Make(ByService());
  const std::string folder = testing::TempDir() + "/a save without ranks";
  std::filesystem::remove_all(folder);
  const uint64_t step = StepToDirections(driver, 3);
  driver.DetachAll();
  const CheckpointInfo saved = driver.job().Save(folder).value();
  EXPECT_EQ(saved.step, step);
  EXPECT_EQ(LastRecord(driver).outcome.left, "");
  const std::string hash = driver.job().StateHash();
  StepOf(by_service, 3);
  EXPECT_EQ(hash, by_service.job().StateHash());
  driver.AttachAll();
  StepToDirections(driver, 5);
  EXPECT_EQ(driver.job().Load(folder).value().step, step);
  EXPECT_EQ(driver.job().StateHash(), hash);
  driver.AttachAll();
  WholeStep(driver, 5);
  std::filesystem::remove_all(folder);
}

TEST_F(JobDirectionsTest, ANewProcessBeginsTheRoundAgain) {
  JobDriver driver = Make(Spec());
  JobDriver undisturbed = Make([] {
    JobSpec spec = Spec();
    spec.name = "undisturbed";
    return spec;
  }());
  const uint64_t step = StepToDirections(driver, 3);
  WholeStep(undisturbed, 3);
  GiveAll(driver, step, 0);
  const Generation before = driver.job().Position().generation;
  driver.Attach(1);  // Another session: the generation rises.
  EXPECT_EQ(driver.job().Position().generation, before.Next());
  driver.Attach(0);
  EXPECT_TRUE(driver.stream(0).position().awaits_orthogonal);
  EXPECT_TRUE(driver.job().Status().ranks[0].orthogonalizes);
  for (int rank = 0; rank < 2; ++rank) GiveAll(driver, step, rank);
  driver.listener(1).WaitForCommit(step);
  // All weights of the step, of other rules, too.
  EXPECT_EQ(driver.listener(1).shards().size(), driver.layout().chunks_of_rank(1).size());
  EXPECT_EQ(driver.job().StateHash(), undisturbed.job().StateHash());
}

TEST_F(JobDirectionsTest, AJobIsClosedInASecondRound) {
  JobDriver driver = Make(Spec());
  StepToDirections(driver, 3);
  const std::string name = driver.job().spec().name;
  EXPECT_TRUE(engine_.CloseJob(name).ok());
  EXPECT_FALSE(engine_.FindJob(name).ok());
}

}  // namespace
}  // namespace ballast
