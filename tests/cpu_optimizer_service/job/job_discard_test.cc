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

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
  const absl::Status more = stream.Discard({1, kMaxAttempts - 1}).status();
  EXPECT_EQ(more.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(more.message(), AllOf(HasSubstr("has discarded 4095 attempts at step 1"),
                                    HasSubstr("ballast abort-step many")));
  ASSERT_TRUE(driver.job().AbortStep().ok());
  EXPECT_EQ(Progress(driver, 0).attempt, 0);
  driver.AttachAll();
  driver.Step(1, 1);
  EXPECT_EQ(driver.job().Status().committed_step, 1);
}

TEST_F(JobDiscardTest, ProvisionalUpdatesOfADiscardedAttemptAreNobodys) {
  JobDriver driver = Make(Spec("speculates"));
  JobDriver twin = Make(Spec("waits", UpdateMode::kWait));
  const std::string before = driver.job().StateHash();
  for (int rank = 0; rank < kRanks; ++rank) {
    Give(driver, rank, 50, 1);
    driver.listener(rank).WaitForProvisional(driver.layout().chunks_of_rank(rank).size());
  }
  for (int rank = 0; rank < kRanks; ++rank) ASSERT_TRUE(driver.Discard(rank));
  EXPECT_EQ(driver.job().StateHash(), before);
  for (int rank = 0; rank < kRanks; ++rank) Give(driver, rank, 5, 1);
  driver.SealAll(1);
  twin.Step(5);
  EXPECT_EQ(driver.job().StateHash(), twin.job().StateHash());
  // The second attempt has provisional updates, too, and none of the first's was taken for one.
  const SpeculationCounts counts = driver.job().Status().recent_steps.back().speculation;
  EXPECT_EQ(counts.speculated, counts.published + counts.redone);
  EXPECT_EQ(counts.redone, 0);
}

TEST_F(JobDiscardTest, SealsOfAnAttemptThatAnotherRankDiscardsAreUndone) {
  JobDriver driver = Make(Spec("undone"));
  for (const int rank : {0, 1, 2}) Give(driver, rank, 1, 1);
  EXPECT_EQ(driver.Seal(1, 1), std::nullopt);
  ASSERT_TRUE(driver.Discard(0));
  ASSERT_EQ(driver.listener(1).refusals().size(), 1u);
  const absl::Status told = driver.listener(1).refusals()[0];
  EXPECT_EQ(ReasonOf(told), reason::kDiscardAndRedo);
  EXPECT_THAT(std::string(told.message()),
              AllOf(HasSubstr("rank 1"), HasSubstr("attempt 0"), HasSubstr("rank 0")));
  EXPECT_THAT(driver.listener(2).refusals(), IsEmpty());  // It had not sealed.
  EXPECT_FALSE(Progress(driver, 1).sealed);
  EXPECT_EQ(driver.job().SecondsSinceFirstSeal(), std::nullopt);
  // Nor can that attempt be sealed again, by whomever, however often.
  for (const int rank : {2, 1, 2}) {
    const std::optional<SealRefusal> refusal = driver.Seal(rank, 1);
    ASSERT_TRUE(refusal.has_value());
    EXPECT_EQ(refusal->attempt, 0u);
    EXPECT_EQ(ReasonOf(refusal->status), reason::kDiscardAndRedo);
    EXPECT_THAT(std::string(refusal->status.message()), HasSubstr("which rank 0 has discarded"));
  }
  // The rank that went on waits for them, and they are named.
  Give(driver, 0, 2, 1);
  EXPECT_EQ(driver.Seal(0, 1), std::nullopt);
  driver.job().TellWaiting();
  EXPECT_THAT(driver.listener(0).waiting(), ElementsAre(1, 2));
  for (const int rank : {1, 2}) {
    ASSERT_TRUE(driver.Discard(rank));
    EXPECT_TRUE(Progress(driver, 0).sealed);  // Their catching up undoes nothing.
    Give(driver, rank, 2, 1);
  }
  driver.SealAll(1);
  JobDriver twin = Make(Spec("twin"));
  twin.Step(2);
  ExpectSameStep(driver, twin);
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
  const auto expect_refused = [&](uint32_t attempt, const std::string& what) {
    for (const absl::Status& status :
         {stream.BeginStep({1, attempt}, {}), stream.EndMicroStep({1, attempt}, 0, {})}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    }
  };
  Give(driver, 0, 7, 1);
  // What comes late is dropped, and does not even look like a repeat that was held.
  EXPECT_EQ(contribute(0).value(), ContributionResult::kDiscarded);
  expect_refused(0, "has discarded attempt 0");
  const std::optional<SealRefusal> refusal = stream.Seal({1, 0}, 1).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->attempt, 0u);
  EXPECT_TRUE(stream.Discard({1, 0}).value()) << "again";
  // And what comes of an attempt that is still to come is an error.
  EXPECT_EQ(contribute(2).status().code(), absl::StatusCode::kFailedPrecondition);
  expect_refused(2, "is in attempt 1");
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

TEST_F(JobDiscardTest, TheNextAttemptHasItsOwnSettings) {
  JobDriver driver = Make(Spec("settings"));
  JobDriver twin = Make(Spec("twin"));
  const StepSettings first = {.scale = {.loss_scale = 1024, .divisors = {2, 3}},
                              .overrides = {{0, {.lr = 0.5}}},
                              .trainer_state = "first"};
  const StepSettings second = {.scale = {.loss_scale = 512, .divisors = {4, 5}},
                               .overrides = {{1, {.lr = 0.25}}},
                               .trainer_state = "second"};
  driver.Begin(0, first);
  ASSERT_TRUE(driver.Discard(0));
  driver.Begin(1, first);  // Of the first attempt, which nobody needs to agree on any more,
  ASSERT_TRUE(driver.Discard(1));
  // An operator's change before the second attempt begins; that one's override comes after it.
  ASSERT_TRUE(driver.job().UpdateGroup(0, {.beta1 = 0.5}).ok());
  ASSERT_TRUE(driver.job().UpdateGroup(1, {.lr = 0.75}).ok());
  Give(driver, 1, 3, 1, second);
  const absl::Status other = driver.stream(0).BeginStep(driver.at(0), first);
  EXPECT_EQ(ReasonOf(other), reason::kOtherSettings);  // and of the second, which they do.
  EXPECT_THAT(std::string(other.message()), HasSubstr("loss_scale 1024 where others have 512"));
  driver.Begin(2, second);
  ASSERT_TRUE(driver.Discard(2)) << "as early as can be";
  ASSERT_TRUE(driver.Discard(1));
  ASSERT_TRUE(driver.Discard(0));
  ASSERT_TRUE(driver.Discard(0));
  for (const int rank : {0, 1, 2}) {
    while (driver.at(rank).attempt < 3) ASSERT_TRUE(driver.Discard(rank));
    Give(driver, rank, 3, 1, second);
  }
  driver.SealAll(1);
  ASSERT_TRUE(twin.job().UpdateGroup(0, {.beta1 = 0.5}).ok());
  ASSERT_TRUE(twin.job().UpdateGroup(1, {.lr = 0.75}).ok());
  for (const int rank : {0, 1, 2}) Give(twin, rank, 3, 1, second);
  twin.SealAll(1);
  ExpectSameStep(driver, twin);
  EXPECT_EQ(driver.job().Status().trainer_state, "second");
  EXPECT_EQ(driver.job().Status().hyper_parameters, twin.job().Status().hyper_parameters);
  EXPECT_EQ(driver.job().Status().hyper_parameters[1].lr, 0.25);
}

TEST_F(JobDiscardTest, WhatADiscardedAttemptSaidOfParametersIsForgotten) {
  JobSpec spec = Spec("used");
  spec.unused_policy = UnusedPolicy::kSkip;
  JobDriver driver = Make(spec);
  spec.name = "twin";
  JobDriver twin = Make(spec);
  const auto give_without = [&](JobDriver& to, int rank, int unused) {
    to.Begin(rank);
    for (const int chunk : to.layout().chunks_of_rank(rank)) {
      std::vector<float> values = to.Values(chunk, 4);
      for (const ChunkPiece& piece : to.layout().Pieces(chunk)) {
        if (piece.parameter != unused) continue;
        std::fill_n(values.begin() + piece.chunk_offset, piece.elements, 0.0f);
      }
      ASSERT_TRUE(to.Send(chunk, values, 0, true).ok());
    }
    to.EndMicroStep(rank, 0, {.all = false, .parameters = {0, 1, 3, 4}});
  };
  // All used, in more micro-steps, one of them not finite, and chunks that came as empty: with any
  // of that the second attempt would be another step, or refused.
  for (const int rank : {0, 1, 2}) {
    driver.Begin(rank);
    for (const int chunk : driver.layout().chunks_of_rank(rank)) {
      ASSERT_TRUE(driver.stream(rank)
                      .Contribute({.step = 1, .chunk = chunk, .micro_step_end = 2, .empty = true})
                      .ok());
    }
    driver.EndMicroStep(rank, 0, {.non_finite = {{.parameter = 2, .value = INFINITY}}});
    driver.EndMicroStep(rank, 1);
  }
  for (const int rank : {2, 0, 1}) ASSERT_TRUE(driver.Discard(rank));
  for (const int rank : {0, 1, 2}) {
    give_without(driver, rank, 2);
    give_without(twin, rank, 2);
  }
  driver.SealAll(1);
  twin.SealAll(1);
  ExpectSameStep(driver, twin);
  EXPECT_THAT(driver.listener(0).outcomes().back().unused_parameters, ElementsAre("p2"));
}

TEST_F(JobDiscardTest, OfAnAttemptThatIsNotBegunCounts) {
  JobDriver driver = Make(Spec("unbegun"));
  JobDriver twin = Make(Spec("twin"));
  ASSERT_TRUE(driver.Discard(1)) << "before any rank has begun the step";
  EXPECT_EQ(driver.job().Status().phase, JobPhase::kOpen);
  EXPECT_EQ(Progress(driver, 1).attempt, 1u);
  EXPECT_FALSE(Progress(driver, 1).begun);
  Give(driver, 0, 30, 1);
  EXPECT_EQ(ReasonOf(driver.Seal(0, 1)->status), reason::kDiscardAndRedo);
  ASSERT_TRUE(driver.Discard(0));
  ASSERT_TRUE(driver.Discard(2));
  for (const int rank : {0, 1, 2}) Give(driver, rank, 3, 1);
  driver.SealAll(1);
  twin.Step(3);
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

TEST_F(JobDiscardTest, AReopenedStreamIsToldTheAttempt) {
  JobDriver driver = Make(Spec("reopened"));
  Give(driver, 0, 1, 2);
  driver.Reopen(0);
  EXPECT_EQ(driver.stream(0).position().attempt, 0u);
  EXPECT_EQ(driver.stream(0).position().open_step, 1u);
  ASSERT_TRUE(driver.Discard(0));
  driver.Reopen(0);
  EXPECT_EQ(driver.stream(0).position().attempt, 1u);
  EXPECT_EQ(driver.stream(0).position().open_step, 0u);  // It has to begin.
  EXPECT_THAT(driver.stream(0).position().delivered, IsEmpty());
  driver.Begin(0);
  const int chunk = driver.layout().chunks_of_rank(0)[0];
  ASSERT_TRUE(driver.Send(chunk, driver.Values(chunk, 1), 0).ok());
  driver.Reopen(0);
  EXPECT_EQ(driver.stream(0).position().attempt, 1u);
  EXPECT_EQ(driver.stream(0).position().open_step, 1u);
  EXPECT_EQ(driver.stream(0).position().delivered.size(), 1u);
}

TEST_F(JobDiscardTest, AProcessThatDiscardedHasAPartInTheStep) {
  JobDriver driver = Make(Spec("replaced"));
  const Generation generation = driver.job().Status().generation;
  Give(driver, 0, 1, 1);
  ASSERT_TRUE(driver.Discard(0));
  driver.Detach(0);
  driver.Attach(0, "another");
  EXPECT_EQ(driver.job().Status().generation, generation.Next());
  EXPECT_EQ(driver.listener(1).detached().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver.stream(0).position().attempt, 0u) << "the step is done anew";
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

// All ranks at once, each in its own time, discarding here and there.
TEST_F(JobDiscardTest, RacesOfDiscardsAndSealsEndInTheSameStep) {
  constexpr int kSteps = 8;
  constexpr uint32_t kAttempts = 4;
  JobDriver driver = MakeWith(Spec("races"), Sending::kMixed);
  JobDriver twin = Make(Spec("twin", UpdateMode::kWait));
  for (int step = 1; step <= kSteps; ++step) {
    const auto run = [&](int rank) {
      std::mt19937 random(static_cast<uint32_t>(step * 10 + rank));
      for (uint32_t attempt = 0; attempt < kAttempts; ++attempt) {
        const bool last = attempt + 1 == kAttempts;
        const StepAttempt at = {static_cast<uint64_t>(step), attempt};
        RankStream& stream = driver.stream(rank);
        ASSERT_TRUE(stream.BeginStep(at, {}).ok());
        // Rank 0 seals the last alone, so that no earlier attempt can be decided.
        for (const int chunk : driver.layout().chunks_of_rank(rank)) {
          if (!last && random() % 4 == 0) continue;
          const uint64_t seed = last ? step : 1000 + random() % 10;
          ASSERT_TRUE(driver.Send(chunk, driver.Values(chunk, seed), 0, true).ok());
        }
        ASSERT_TRUE(stream.EndMicroStep(at, 0, {}).ok());
        if (last || (rank != 0 && random() % 2 == 0)) (void)stream.Seal(at, 1).value();
        if (!last) ASSERT_TRUE(driver.Discard(rank));
      }
    };
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(run, rank);
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < kRanks; ++rank) driver.listener(rank).WaitForCommit(step);
    twin.Step(step);
    ASSERT_EQ(driver.job().StateHash(), twin.job().StateHash()) << "step " << step;
  }
}

}  // namespace
}  // namespace ballast
