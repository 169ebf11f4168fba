// P5: updating chunks ahead of the decision gives the same bits as waiting, and nothing of it shows
// before the decision.
#include "cpu_optimizer_service/job/step/speculation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using ::testing::IsEmpty;

class SpeculationTest : public JobDriverTest {
 protected:
  // Chunks of 1024 elements, four of them in one group.
  static JobSpec Spec(UpdateMode mode, const std::string& name) {
    JobSpec spec = MakeJobSpec(
        {.group_sizes = {{1024, 1024, 2048}}, .bucket_elements = 1024, .chunk_elements = 1024},
        name);
    spec.update_mode = mode;
    return spec;
  }
  // The same job twice: one that speculates, and what it has to equal.
  std::pair<JobDriver, JobDriver> MakeClippingPair(double max_norm) {
    auto pair = MakePair();
    pair.first.SetMaxNorm(max_norm);
    pair.second.SetMaxNorm(max_norm);
    return pair;
  }
  std::pair<JobDriver, JobDriver> MakePair(const std::function<void(JobSpec&)>& change = {}) {
    JobSpec speculating = Spec(UpdateMode::kSpeculate, "speculating");
    JobSpec waiting = Spec(UpdateMode::kWait, "waiting");
    if (change) {
      change(speculating);
      change(waiting);
    }
    return {Make(speculating), Make(waiting)};
  }
  static std::vector<std::byte> Committed(JobDriver& driver, int chunk) {
    const JobStatus status = driver.job().Status();
    const Chunk& place = driver.layout().chunks()[chunk];
    std::vector<std::byte> bytes(place.elements *
                                 SizeBytes(driver.job().spec().groups[place.group].return_dtype));
    EXPECT_TRUE(
        driver.job()
            .ReadShard(status.generation, status.committed_step, chunk, absl::MakeSpan(bytes))
            .ok());
    return bytes;
  }
  // Every chunk that the rank was told stands as the service has it, and none is missing.
  static void ExpectToldAll(JobDriver& driver) {
    for (int rank = 0; rank < driver.layout().world_size(); ++rank) {
      const auto shards = driver.listener(rank).shards();
      for (const int chunk : driver.layout().chunks_of_rank(rank)) {
        ASSERT_TRUE(shards.contains(chunk)) << "chunk " << chunk;
        if (shards.at(chunk).has_value()) {
          EXPECT_EQ(*shards.at(chunk), Committed(driver, chunk)) << "chunk " << chunk;
        }
      }
    }
  }
  static SpeculationCounts Counts(JobDriver& driver) { return driver.job().Status().speculation; }
  static std::vector<float> Large(JobDriver& driver, int chunk, float value) {
    return std::vector<float>(driver.layout().chunks()[chunk].elements, value);
  }
};

TEST_F(SpeculationTest, UpdatesBeforeTheSealAndShowsNothingOfIt) {
  auto [speculating, waiting] = MakePair();
  const std::string before = speculating.job().StateHash();
  speculating.BeginAll();
  speculating.SendAll(5, 0, /*final=*/true);
  speculating.listener(0).WaitForProvisional(4);
  EXPECT_EQ(speculating.job().StateHash(), before);
  for (int chunk = 0; chunk < 4; ++chunk) {
    EXPECT_EQ(Committed(speculating, chunk), Committed(waiting, chunk));
  }
  EXPECT_THAT(speculating.listener(0).shards(), IsEmpty());
  speculating.EndMicroStepAll(0);
  speculating.SealAll(1);
  waiting.Step(5);
  EXPECT_EQ(speculating.job().StateHash(), waiting.job().StateHash());
  ExpectToldAll(speculating);
  const SpeculationCounts counts = Counts(speculating);
  EXPECT_EQ(counts.speculated, 4);
  EXPECT_EQ(counts.published, 4);
  EXPECT_EQ(counts.redone, 0);
  EXPECT_EQ(speculating.job().Status().recent_steps.back().speculation.published, 4);
  EXPECT_EQ(Counts(waiting).speculated, 0);
}

TEST_F(SpeculationTest, SpeculatesWithClippingOnAndNormsBelowIt) {
  auto [speculating, waiting] = MakeClippingPair(1000);
  for (uint64_t step = 0; step < 3; ++step) {
    speculating.BeginAll();
    speculating.SendAll(step, 0, /*final=*/true);
    speculating.listener(0).WaitForProvisional(4);
    speculating.EndMicroStepAll(0);
    speculating.SealAll(1);
    const Decision decision = speculating.listener(0).outcomes().back().decision;
    EXPECT_EQ(decision.clip_coefficient, 1.0);
    EXPECT_EQ(decision, waiting.Step(step).decision);
  }
  EXPECT_EQ(speculating.job().StateHash(), waiting.job().StateHash());
  EXPECT_EQ(Counts(speculating).published, 12);
  EXPECT_EQ(Counts(speculating).redone, 0);
}

TEST_F(SpeculationTest, ComputesAgainWhenAStepIsClipped) {
  auto [speculating, waiting] = MakeClippingPair(100);
  for (JobDriver* driver : {&speculating, &waiting}) {
    driver->Step(1);
    driver->BeginAll();
    for (int chunk = 0; chunk < 3; ++chunk) {
      ASSERT_TRUE(driver->Send(chunk, driver->Values(chunk, 7), 0, true).ok());
    }
    if (driver == &speculating) driver->listener(0).WaitForProvisional(3);
    ASSERT_TRUE(driver->Send(3, Large(*driver, 3, 50), 0, true).ok());
    driver->EndMicroStepAll(0);
    driver->SealAll(1);
    EXPECT_LT(driver->listener(0).outcomes().back().decision.clip_coefficient, 1.0);
  }
  EXPECT_EQ(speculating.job().StateHash(), waiting.job().StateHash());
  ExpectToldAll(speculating);
  const SpeculationCounts step = speculating.job().Status().recent_steps.back().speculation;
  EXPECT_EQ(step.speculated, 3);  // The fourth showed that the step would be clipped.
  EXPECT_EQ(step.published, 0);
  EXPECT_EQ(step.redone, 3);
  // The gradient is kept until then, and gone after: another step equals again.
  EXPECT_EQ(speculating.Step(9).decision, waiting.Step(9).decision);
  EXPECT_EQ(speculating.job().StateHash(), waiting.job().StateHash());
}

TEST_F(SpeculationTest, AStreamThatWaitsIsToldNothingEarly) {
  JobSpec spec = Spec(UpdateMode::kSpeculate, "job");
  JobDriver driver(engine_, spec);
  driver.UploadWeights();
  driver.Attach(0, "process", UpdateMode::kWait);
  driver.Step(5);
  EXPECT_EQ(Counts(driver).speculated, 0);
  ExpectToldAll(driver);
}

// Keeps what it is given, so that the pool runs dry.
class Hoarder : public RecordingListener {
 public:
  void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer shard) override {
    EXPECT_TRUE(shard) << "chunk " << chunk;
    {
      MutexLock lock(mutex_);
      kept_.push_back(std::move(shard));
    }
    RecordingListener::OnProvisionalWeights(step, chunk, WeightBuffer());
  }
  void GiveBackOne() {
    WeightBuffer shard;
    MutexLock lock(mutex_);
    shard = std::move(kept_.back());
    kept_.pop_back();
  }
  void GiveBackAll() {
    std::vector<WeightBuffer> kept;
    MutexLock lock(mutex_);
    kept.swap(kept_);
  }

 private:
  Mutex mutex_;
  std::vector<WeightBuffer> kept_ ABSL_GUARDED_BY(mutex_);
};

constexpr int kManyChunks = 100;  // More than there are buffers.
constexpr int kShardBuffers = 32;

class ParkedUpdateTest : public SpeculationTest {
 protected:
  ParkedUpdateTest() {
    JobSpec spec =
        MakeJobSpec({.group_sizes = {{kManyChunks * 256}}, .world_size = 1, .chunk_elements = 256},
                    "speculating");
    JobSpec waiting_spec = spec;
    waiting_spec.name = "waiting";
    spec.update_mode = UpdateMode::kSpeculate;
    driver_ = std::make_unique<JobDriver>(engine_, spec);
    driver_->UploadWeights();
    driver_->Attach(0, "process", UpdateMode::kSpeculate, hoarder_);
    waiting_ = std::make_unique<JobDriver>(Make(waiting_spec));
  }
  void BeginAndSendAll() {
    driver_->BeginAll();
    driver_->SendAll(5, 0, /*final=*/true);
    hoarder_->WaitForProvisional(kShardBuffers);
  }
  void FinishAndCompare() {
    driver_->EndMicroStepAll(0);
    driver_->SealAll(1);
    waiting_->Step(5);
    EXPECT_EQ(driver_->job().StateHash(), waiting_->job().StateHash());
    EXPECT_EQ(hoarder_->shards().size(), size_t{kManyChunks});
    for (int chunk = 0; chunk < kManyChunks; ++chunk) {
      EXPECT_EQ(Committed(*driver_, chunk), Committed(*waiting_, chunk));
    }
  }

  const std::shared_ptr<Hoarder> hoarder_ = std::make_shared<Hoarder>();
  std::unique_ptr<JobDriver> driver_;
  std::unique_ptr<JobDriver> waiting_;
};

TEST_F(ParkedUpdateTest, AReaderThatStallsStopsSpeculationAndNothingElse) {
  BeginAndSendAll();
  // Another job goes on speculating.
  JobDriver other = Make(Spec(UpdateMode::kSpeculate, "other"));
  other.BeginAll();
  other.SendAll(5, 0, /*final=*/true);
  other.listener(0).WaitForProvisional(4);
  // One that has been told is counted soon after.
  while (Counts(*driver_).speculated < kShardBuffers) std::this_thread::yield();
  EXPECT_EQ(Counts(*driver_).speculated, kShardBuffers);
  FinishAndCompare();
  EXPECT_EQ(Counts(*driver_).published, kShardBuffers);
}

TEST_F(ParkedUpdateTest, SpeculationGoesOnAsBuffersComeBack) {
  BeginAndSendAll();
  for (size_t told = kShardBuffers; told < kManyChunks; ++told) {
    hoarder_->GiveBackOne();
    hoarder_->WaitForProvisional(told + 1);
  }
  FinishAndCompare();
  EXPECT_EQ(Counts(*driver_).published, kManyChunks);
}

TEST_F(ParkedUpdateTest, AllThatCameBackAtOnceIsUsed) {
  BeginAndSendAll();
  hoarder_->GiveBackAll();
  hoarder_->WaitForProvisional(2 * kShardBuffers);
  hoarder_->GiveBackAll();
  hoarder_->WaitForProvisional(3 * kShardBuffers);
  FinishAndCompare();
}

TEST_F(ParkedUpdateTest, OfAnAbortedStepIsForgotten) {
  BeginAndSendAll();
  ASSERT_TRUE(driver_->job().AbortStep().ok());
  hoarder_->GiveBackAll();
  driver_->Attach(0, "process", UpdateMode::kSpeculate, hoarder_);
  driver_->BeginAll();
  // Chunks that have not come, or have come otherwise, have no provisional updates.
  ASSERT_TRUE(driver_->Send(99, Large(*driver_, 99, 3), 0, true).ok());
  while (Counts(*driver_).speculated < kShardBuffers + 1) std::this_thread::yield();
  ASSERT_TRUE(driver_->job().AbortStep().ok());
  EXPECT_EQ(Counts(*driver_).speculated, kShardBuffers + 1);
  hoarder_->GiveBackAll();
  driver_->Attach(0, "process", UpdateMode::kSpeculate, hoarder_);
  driver_->BeginAll();
  driver_->SendAll(5, 0, /*final=*/true);
  FinishAndCompare();
}

TEST_F(ParkedUpdateTest, WeightsInPlaceNeedNoBuffer) {
  driver_->SetSending(Sending::kInPlace);
  driver_->Attach(0, "process", UpdateMode::kSpeculate);
  driver_->BeginAll();
  driver_->SendAll(5, 0, /*final=*/true);
  driver_->listener(0).WaitForProvisional(kManyChunks);
  driver_->EndMicroStepAll(0);
  driver_->SealAll(1);
  EXPECT_EQ(Counts(*driver_).published, kManyChunks);
  EXPECT_EQ(driver_->listener(0).in_place(), kManyChunks);
  waiting_->Step(5);
  EXPECT_EQ(driver_->job().StateHash(), waiting_->job().StateHash());
}

// Does not come back from being told until it is let go.
class Blocking : public RecordingListener {
 public:
  void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer shard) override {
    MutexLock lock(mutex_);
    told_ = true;
    changed_.NotifyAll();
    while (!let_go_) changed_.Wait(mutex_);
  }
  void WaitUntilTold() {
    MutexLock lock(mutex_);
    while (!told_) changed_.Wait(mutex_);
  }
  void LetGo() {
    MutexLock lock(mutex_);
    let_go_ = true;
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool told_ ABSL_GUARDED_BY(mutex_) = false;
  bool let_go_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST_F(SpeculationTest, ARunningUpdateHoldsBackTheEndOfItsStep) {
  JobDriver speculating(engine_, Spec(UpdateMode::kSpeculate, "speculating"));
  speculating.UploadWeights();
  const auto blocking = std::make_shared<Blocking>();
  speculating.Attach(0, "process0", UpdateMode::kSpeculate, blocking);
  speculating.BeginAll();
  speculating.SendAll(5, 0, /*final=*/true);
  blocking->WaitUntilTold();
  std::thread abort([&] { EXPECT_TRUE(speculating.job().AbortStep().ok()); });
  blocking->LetGo();
  abort.join();
  speculating.AttachAll();
  speculating.Step(6);
  JobDriver waiting = Make(Spec(UpdateMode::kWait, "waiting"));
  waiting.Step(6);
  EXPECT_EQ(speculating.job().StateHash(), waiting.job().StateHash());
}

TEST_F(SpeculationTest, AJobThatDoesNotFitTwiceWaits) {
  JobSpec spec = Spec(UpdateMode::kSpeculate, "job");
  spec.update_mode = UpdateMode::kWait;
  const int64_t need = NeedOf(spec, Layout::Create(spec.layout).value()).total_bytes();
  spec.update_mode = UpdateMode::kSpeculate;
  const int64_t twice = NeedOf(spec, Layout::Create(spec.layout).value()).total_bytes();
  const int64_t state = 3 * 4096 * static_cast<int64_t>(sizeof(float));
  EXPECT_GE(twice - need, state);
  EXPECT_LT(twice - need, state * 1.1);

  Engine small({.memory_limit_bytes = twice - 1, .threads = 2});
  JobDriver driver(small, spec);
  EXPECT_EQ(small.memory().used_bytes(), need);
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(5);
  const JobStatus status = driver.job().Status();
  EXPECT_EQ(status.speculation.speculated, 0);
  EXPECT_EQ(status.memory.speculation_bytes, 0);
  EXPECT_TRUE(Says(status.speculation_refused));

  Engine enough({.memory_limit_bytes = twice, .threads = 2});
  EXPECT_THAT(JobDriver(enough, spec).job().Status().speculation_refused, IsEmpty());

  Engine tiny({.memory_limit_bytes = need - 1, .threads = 2});
  EXPECT_EQ(tiny.CreateJob(spec).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(tiny.memory().used_bytes(), 0);
}

TEST_F(SpeculationTest, FailedUpdatesGiveTheirMemoryBack) {
  JobSpec spec = Spec(UpdateMode::kSpeculate, "job");
  Engine engine(
      {.memory_limit_bytes = NeedOf(spec, Layout::Create(spec.layout).value()).total_bytes(),
       .threads = 2});
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  driver.AttachAll();
  driver.SetMaxNorm(100);
  for (int step = 0; step < SpeculationHistory::kPauseAt; ++step) {
    driver.BeginAll();
    for (int chunk = 0; chunk < 3; ++chunk) {
      ASSERT_TRUE(driver.Send(chunk, driver.Values(chunk, 7), 0, true).ok());
    }
    driver.listener(0).WaitForProvisional(3);
    ASSERT_TRUE(driver.Send(3, Large(driver, 3, 50), 0, true).ok());
    driver.EndMicroStepAll(0);
    driver.SealAll(1);
    EXPECT_EQ(driver.job().Status().recent_steps.back().speculation.redone, 3);
  }
}

TEST_F(SpeculationTest, ASnapshotKeepsItsVersionWhateverBecomesOfTheProvisionalOne) {
  auto [speculating, waiting] = MakeClippingPair(100);
  speculating.Step(1);
  waiting.Step(1);
  for (const bool clipped : {false, true}) {
    const auto taken = speculating.job().TakeSnapshot({0, 1, 2});
    ASSERT_TRUE(taken.ok()) << taken.status();
    std::vector<float> before(1024);
    taken->Read(0, Plane::kMaster, 0, absl::MakeSpan(before));
    for (JobDriver* driver : {&speculating, &waiting}) {
      driver->BeginAll();
      for (int chunk = 0; chunk < 3; ++chunk) {
        ASSERT_TRUE(driver->Send(chunk, driver->Values(chunk, 7), 0, true).ok());
      }
      if (driver == &speculating) driver->listener(0).WaitForProvisional(3);
      ASSERT_TRUE(driver->Send(3, Large(*driver, 3, clipped ? 50 : 0.5), 0, true).ok());
      driver->EndMicroStepAll(0);
      driver->SealAll(1);
    }
    std::vector<float> after(1024);
    taken->Read(0, Plane::kMaster, 0, absl::MakeSpan(after));
    EXPECT_EQ(before, after);
    EXPECT_EQ(speculating.job().StateHash(), waiting.job().StateHash());
  }
}

TEST(SpeculationHistory, PausesAtFourFailuresAndResumesWhenTheyAreRare) {
  SpeculationHistory history;
  for (int i = 0; i < 3; ++i) {
    history.Record(false);
    EXPECT_FALSE(history.paused());
  }
  history.Record(true);
  history.Record(false);
  EXPECT_TRUE(history.paused());
  int steps = 0;
  for (; history.paused(); ++steps) history.Record(true);
  EXPECT_EQ(steps, 14);            // When the last but one failure is 16 steps old.
  for (int i = 0; i < 100; ++i) {  // One failure in 16 pauses nothing.
    history.Record(i % 16 != 0);
    EXPECT_FALSE(history.paused());
  }
}

TEST_F(SpeculationTest, PausesWhileEveryStepIsClippedAndGoesOnAfterwards) {
  auto [speculating, waiting] = MakeClippingPair(0.001);
  const auto step = [&speculating = speculating, &waiting = waiting](double divisor) {
    const StepSettings settings = {.scale = {.divisors = {divisor}}};
    EXPECT_EQ(speculating.Step(1, 1, settings).decision, waiting.Step(1, 1, settings).decision);
  };
  for (int i = 0; i < SpeculationHistory::kPauseAt; ++i) step(1);
  EXPECT_EQ(speculating.job().Status().speculation_paused, 4);
  const int64_t before = Counts(speculating).speculated;
  for (int i = 0; i < SpeculationHistory::kSteps - 1; ++i) step(1e9);
  EXPECT_EQ(Counts(speculating).speculated, before);
  EXPECT_EQ(speculating.job().Status().speculation_paused, 0);
  speculating.BeginAll({.scale = {.divisors = {1e9}}});
  speculating.SendAll(1, 0, true);
  speculating.listener(0).WaitForProvisional(4);
  speculating.EndMicroStepAll(0);
  speculating.SealAll(1);
  step(1e9);
  waiting.Step(1, 1, {.scale = {.divisors = {1e9}}});
  EXPECT_EQ(speculating.job().StateHash(), waiting.job().StateHash());
  EXPECT_GT(Counts(speculating).speculated, before);
}

}  // namespace
}  // namespace ballast
