// A rank takes back what it gave and gives the step again: the step is then the one that it would
// have been without (P1, P2, P3), whatever was under way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/eventually.h"
#include "tests/support/messages.h"

namespace ballast::job_discard_test {
namespace {

constexpr int kRanks = 3;

JobSpec Spec(const std::string& name, UpdateMode mode = UpdateMode::kSpeculate) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{1000, 24, 3000}, {700, 900}},
                              .world_size = kRanks,
                              .bucket_elements = 1536,
                              .chunk_elements = 256},
                             name);
  spec.update_mode = mode;
  return spec;
}

class JobDiscardTest : public JobDriverTest {
 protected:
  JobDriver MakeWith(const JobSpec& spec, Sending sending) {
    JobDriver driver(engine_, spec);
    driver.UploadWeights();
    driver.SetSending(sending);
    driver.AttachAll();
    return driver;
  }
  // A rank's part of an attempt, up to its seal.
  static void Give(JobDriver& driver, int rank, uint64_t seed, uint32_t micro_steps,
                   const StepSettings& settings = {}, const UsedParameters& used = {}) {
    driver.Begin(rank, settings);
    for (uint32_t m = 0; m < micro_steps; ++m) {
      driver.SendOf(rank, seed + m, m, m + 1 == micro_steps);
      driver.EndMicroStep(rank, m, used);
    }
  }
  static RankProgress Progress(JobDriver& driver, int rank) {
    return driver.job().Status().ranks[rank];
  }
  static void ExpectSameStep(JobDriver& driver, JobDriver& twin) {
    EXPECT_EQ(driver.job().StateHash(), twin.job().StateHash());
    const StepRecord came = driver.job().Status().recent_steps.back();
    const StepRecord wanted = twin.job().Status().recent_steps.back();
    EXPECT_EQ(came.outcome.decision, wanted.outcome.decision);
    EXPECT_EQ(came.outcome.unused_parameters, wanted.outcome.unused_parameters);
    EXPECT_EQ(came.micro_steps, wanted.micro_steps);
    EXPECT_EQ(driver.job().Status().coverage_complete_steps,
              twin.job().Status().coverage_complete_steps);
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(driver.listener(rank).shards(), twin.listener(rank).shards()) << "rank " << rank;
    }
  }
};

class EveryWayToDiscard : public JobDiscardTest,
                          public testing::WithParamInterface<std::tuple<UpdateMode, Sending>> {};

TEST_P(EveryWayToDiscard, EarlyAndLateGivesTheStepThatItWouldHaveBeen) {
  const auto [mode, sending] = GetParam();
  JobDriver driver = MakeWith(Spec("discards", mode), sending);
  JobDriver twin = MakeWith(Spec("does-not", mode), sending);
  for (uint64_t step = 0; step < 3; ++step) {
    // Rank 0 takes back what it has at its first micro-step, in part final; rank 1 all but its
    // seal; rank 2 seals first.
    driver.Begin(0);
    for (const int chunk : driver.layout().chunks_of_rank(0)) {
      if (chunk % 3 == 0) continue;
      ASSERT_TRUE(driver.Send(chunk, driver.Values(chunk, 77), 0, chunk % 3 == 1).ok());
    }
    Give(driver, 1, 78, 2);
    Give(driver, 2, 79, 2);
    EXPECT_EQ(driver.Seal(2, 2), std::nullopt);
    ASSERT_TRUE(driver.Discard(0));
    ASSERT_TRUE(driver.Discard(2));
    Give(driver, 2, 10 * step, 3);
    ASSERT_TRUE(driver.Discard(1));
    EXPECT_EQ(driver.job().Status().accumulators_in_use,
              static_cast<int64_t>(driver.layout().chunks_of_rank(2).size()));
    Give(driver, 0, 10 * step, 3);
    Give(driver, 1, 10 * step, 3);
    driver.SealAll(3);
    twin.Step(10 * step, 3);
    ExpectSameStep(driver, twin);
  }
}

INSTANTIATE_TEST_SUITE_P(
    JobDiscardTest, EveryWayToDiscard,
    testing::Combine(testing::Values(UpdateMode::kWait, UpdateMode::kSpeculate),
                     testing::Values(Sending::kPayload, Sending::kInPlace, Sending::kMixed)));

TEST_F(JobDiscardTest, AStepHasSoManyAttempts) {
  JobDriver driver = MakeWith(Spec("many"), Sending::kPayload);
  RankStream& stream = driver.stream(0);
  for (uint32_t attempt = 0; attempt + 1 < kMaxAttempts; ++attempt) {
    ASSERT_TRUE(stream.Discard({1, attempt}).ok());
  }
  EXPECT_TRUE(Refused(stream.Discard({1, kMaxAttempts - 1}), absl::StatusCode::kResourceExhausted));
  ASSERT_TRUE(driver.job().AbortStep().ok());
  EXPECT_EQ(Progress(driver, 0).attempt, 0);
  driver.AttachAll();
  driver.Step(1, 1);
  EXPECT_EQ(driver.job().Status().committed_step, 1);
}

TEST_F(JobDiscardTest, MessagesOfAnAttemptThatIsNotTheRanksChangeNothing) {
  JobDriver driver = Make(Spec("late"));
  Give(driver, 0, 60, 1);
  ASSERT_TRUE(driver.Discard(0));
  RankStream& stream = driver.stream(0);
  const int chunk = driver.layout().chunks_of_rank(0)[0];
  const std::vector<std::byte> bytes = driver.Encode(chunk, driver.Values(chunk, 60));
  const absl::Span<const std::byte> piece(bytes);
  const auto contribute = [&](uint32_t attempt) {
    return stream.Contribute(
        {.step = 1, .attempt = attempt, .chunk = chunk, .payload = {&piece, 1}});
  };
  const auto expect_refused = [&](uint32_t attempt) {
    for (const absl::Status& status :
         {stream.BeginStep({1, attempt}, {}), stream.EndMicroStep({1, attempt}, 0, {})}) {
      EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
    }
  };
  Give(driver, 0, 7, 1);
  // What comes late is dropped, and does not even look like a repeat that was held.
  EXPECT_EQ(contribute(0).value(), ContributionResult::kDiscarded);
  expect_refused(0);
  const std::optional<SealRefusal> refusal = stream.Seal({1, 0}, 1).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->attempt, 0u);
  EXPECT_TRUE(stream.Discard({1, 0}).value()) << "again";
  // And what comes of an attempt that is still to come is an error.
  EXPECT_EQ(contribute(2).status().code(), absl::StatusCode::kFailedPrecondition);
  expect_refused(2);
  EXPECT_EQ(stream.Seal({1, 2}, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(stream.Discard({1, 2}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(stream.Discard({2, 0}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(stream.Discard({2, 0}).status()), reason::kOtherStep);
  for (const int rank : {1, 2}) {
    ASSERT_TRUE(driver.Discard(rank));
    Give(driver, rank, 7, 1);
  }
  driver.SealAll(1);
  JobDriver twin = Make(Spec("twin"));
  twin.Step(7);
  ExpectSameStep(driver, twin);
  // Too late, and nothing changes.
  EXPECT_FALSE(stream.Discard({1, 1}).value());
  EXPECT_EQ(driver.job().StateHash(), twin.job().StateHash());
  // The next step begins with the first attempt.
  EXPECT_EQ(stream.BeginStep({2, 1}, {}).code(), absl::StatusCode::kFailedPrecondition);
  driver.Step(8);
  twin.Step(8);
  ExpectSameStep(driver, twin);
}

TEST_F(JobDiscardTest, MemoryThatOnlyTheAttemptReadIsLetGoOf) {
  JobDriver driver = MakeWith(Spec("lent"), Sending::kInPlace);
  Give(driver, 0, 1, 1);
  const std::weak_ptr<const HeapRankMemory> memory = driver.TakeMemory(0);
  driver.job().DropRankMemory(0, memory.lock().get());
  EXPECT_FALSE(memory.expired()) << "its gradients are read there";
  ASSERT_TRUE(driver.Discard(0));
  EXPECT_TRUE(Eventually([&] { return memory.expired(); }));
}

// Holds back the provisional update of a chunk at its end.
class HoldingListener : public RecordingListener {
 public:
  void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer shard) override {
    {
      MutexLock lock(mutex_);
      ++held_;
      changed_.NotifyAll();
      while (!released_) changed_.Wait(mutex_);
    }
    RecordingListener::OnProvisionalWeights(step, chunk, std::move(shard));
  }
  void AwaitHeld() {
    MutexLock lock(mutex_);
    while (held_ == 0) changed_.Wait(mutex_);
  }
  void Release() {
    MutexLock lock(mutex_);
    released_ = true;
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
};

class DiscardDuringAProvisionalUpdate : public JobDiscardTest {
 protected:
  DiscardDuringAProvisionalUpdate() {
    driver_.Attach(0, "", UpdateMode::kSpeculate, holding_);
    chunk_ = driver_.layout().chunks_of_rank(0)[0];
    driver_.Begin(0);
    EXPECT_TRUE(driver_.Send(chunk_, driver_.Values(chunk_, 40), 0, true).ok());
    holding_->AwaitHeld();
    pending_ = driver_.stream(0).Discard({1, 0}, [this](absl::StatusOr<bool> done) {
      MutexLock lock(mutex_);
      detached_first_ = holding_->detached();
      done_ = std::move(done);
      changed_.NotifyAll();
    });
    MutexLock lock(mutex_);
    EXPECT_FALSE(done_.has_value()) << "the update reads the gradient";
  }
  ~DiscardDuringAProvisionalUpdate() override { holding_->Release(); }
  absl::StatusOr<bool> AwaitDone() {
    MutexLock lock(mutex_);
    while (!done_.has_value()) changed_.Wait(mutex_);
    return *done_;
  }
  // What rank 0 has given is still there.
  void ExpectNothingDiscarded() {
    EXPECT_EQ(Progress(driver_, 0).attempt, 0u);
    EXPECT_EQ(Progress(driver_, 0).furthest_micro_step, 1u);
  }

  std::shared_ptr<HoldingListener> holding_ = std::make_shared<HoldingListener>();
  JobDriver driver_ = Make(Spec("held"));
  int chunk_ = 0;
  Pending pending_;
  Mutex mutex_;
  CondVar changed_;
  std::optional<absl::StatusOr<bool>> done_ ABSL_GUARDED_BY(mutex_);
  absl::Status detached_first_;  // What the listener had been told when the Done came.
};

TEST_F(DiscardDuringAProvisionalUpdate, WaitsForItsEnd) {
  ExpectNothingDiscarded();
  ASSERT_TRUE(driver_.Discard(1)) << "and no other rank does";
  holding_->Release();
  EXPECT_TRUE(AwaitDone().value());
  EXPECT_EQ(Progress(driver_, 0).attempt, 1u);
  EXPECT_EQ(Progress(driver_, 0).furthest_micro_step, 0u);
}

TEST_F(DiscardDuringAProvisionalUpdate, IsNothingIfItsStreamBreaksBefore) {
  driver_.Reopen(0);
  EXPECT_EQ(driver_.stream(0).position().attempt, 0u);
  EXPECT_EQ(driver_.stream(0).position().delivered.size(), 1u);
  holding_->Release();
  EXPECT_EQ(AwaitDone().status().code(), absl::StatusCode::kAborted);
  ExpectNothingDiscarded();
  // The attempt goes on, and is decided with what it has.
  for (const int chunk : driver_.layout().chunks_of_rank(0)) {
    ASSERT_TRUE(driver_.Send(chunk, driver_.Values(chunk, 40), 0, true).ok());
  }
  driver_.EndMicroStep(0, 0);
  for (const int rank : {1, 2}) Give(driver_, rank, 40, 1);
  driver_.SealAll(1);
  JobDriver twin = Make(Spec("twin"));
  twin.Step(40);
  EXPECT_EQ(driver_.job().StateHash(), twin.job().StateHash());
}

TEST_F(DiscardDuringAProvisionalUpdate, IsNothingIfItsCallerGivesUpBefore) {
  pending_.Cancel();
  EXPECT_EQ(AwaitDone().status().code(), absl::StatusCode::kCancelled);
  ExpectNothingDiscarded();
}

TEST_F(DiscardDuringAProvisionalUpdate, EndsWithTheGenerationIfThatRises) {
  const Generation generation = driver_.job().Status().generation;
  std::thread abort([&] { EXPECT_TRUE(driver_.job().AbortStep().ok()); });
  while (driver_.job().Status().generation == generation) std::this_thread::yield();
  holding_->Release();
  EXPECT_EQ(AwaitDone().status().code(), absl::StatusCode::kAborted);
  abort.join();
  // The listener was told why before, or the stream would end without the reason.
  EXPECT_EQ(ReasonOf(detached_first_), reason::kOlderGeneration);
}

}  // namespace
}  // namespace ballast::job_discard_test
