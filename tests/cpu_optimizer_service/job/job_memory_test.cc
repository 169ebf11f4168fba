// Memory that runs out in the middle of a job's work: that job is broken, with a status that says so;
// the process lives, and a job beside it keeps its bits.
//
// Every allocation of a step is made to fail once, one after another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "tests/cpu_optimizer_service/host/keeper_for_two.h"
#include "tests/cpu_optimizer_service/job/held_updates.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/job/outcome.h"
#include "tests/support/failing_memory.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

// Remembers without memory of its own, so that only the engine's allocations are counted.
class QuietListener : public RankListener {
 public:
  void OnWaiting(uint64_t, const std::vector<int>&) override {}
  void OnSealRefused(uint64_t, const SealRefusal&) override {}
  void OnNorm(const StepNorm&) override {
    MutexLock lock(mutex_);
    has_norm_ = true;
    changed_.NotifyAll();
  }
  void OnVoteRefused(StepAttempt, const absl::Status&) override {}
  void OnProvisionalWeights(uint64_t, int, WeightBuffer) override {}
  void OnDecision(const StepOutcome&, absl::Span<const int>) override {}
  void OnWeights(uint64_t, int, WeightBuffer) override {}
  void OnCommitted(uint64_t step, double) override {
    MutexLock lock(mutex_);
    committed_ = step;
    changed_.NotifyAll();
  }
  void OnDetached(const absl::Status& status) override {
    MutexLock lock(mutex_);
    detached_ = status;
    changed_.NotifyAll();
  }
  void AwaitNorm() {
    MutexLock lock(mutex_);
    while (!has_norm_ && detached_.ok()) changed_.Wait(mutex_);
  }
  // OK: the step is committed.
  absl::Status AwaitCommit(uint64_t step) {
    MutexLock lock(mutex_);
    while (committed_ < step && detached_.ok()) changed_.Wait(mutex_);
    return committed_ < step ? detached_ : absl::OkStatus();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool has_norm_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t committed_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status detached_ ABSL_GUARDED_BY(mutex_);
};

JobSpec SpecOf(UpdateMode mode, const std::string& name) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{700, 24}, {900}},
                              .world_size = 2,
                              .bucket_elements = 512,
                              .chunk_elements = 256},
                             name);
  spec.update_mode = mode;
  return spec;
}

// One step of all ranks, of gradients that were made before. They discard what they give first, and
// vote when they know the norm.
class Victim {
 public:
  Victim(Engine& engine, const JobSpec& spec)
      : job_(engine.CreateJob(spec).value()), values_(job_) {
    values_.UploadWeights();
    for (int chunk = 0; chunk < static_cast<int>(job_->layout().chunks().size()); ++chunk) {
      payloads_.push_back(values_.Encode(chunk, values_.Values(chunk, 2)));
    }
    for (int rank = 0; rank < job_->layout().world_size(); ++rank) {
      const std::string process = "process" + std::to_string(rank);
      const Attachment attachment = job_->Attach({.rank = rank, .process_id = process}).value();
      listeners_.push_back(std::make_shared<QuietListener>());
      streams_.push_back(job_->OpenStream({.uid = job_->uid(),
                                           .rank = rank,
                                           .process_id = process,
                                           .generation = attachment.generation,
                                           .update_mode = spec.update_mode},
                                          listeners_.back())
                             .value());
    }
  }

  // Of each rank: OK if the step was committed there. Allocation `failing` of it fails, from 0.
  std::vector<absl::Status> Step(int64_t failing = -1) {
    std::vector<absl::Status> ends(streams_.size());
    const StepSettings settings = {.scale = {.divisors = {2, 2}}, .overrides = {}};
    left_until_failure = failing;  // What follows is the engine's alone.
    for (size_t rank = 0; rank < streams_.size(); ++rank) {
      ends[rank].Update(streams_[rank]->BeginStep(1, settings));
    }
    for (size_t rank = 0; rank < streams_.size(); ++rank) {
      const int chunk = job_->layout().chunks_of_rank(static_cast<int>(rank)).front();
      const absl::Span<const std::byte> piece(payloads_[chunk]);
      const Contribution given = {.step = 1, .chunk = chunk, .final = true, .payload = {&piece, 1}};
      ends[rank].Update(streams_[rank]->Contribute(given).status());
      ends[rank].Update(streams_[rank]->Discard(1).status());
      ends[rank].Update(streams_[rank]->BeginStep({1, 1}, settings));
    }
    for (uint32_t micro_step = 0; micro_step < 2; ++micro_step) {
      for (size_t chunk = 0; chunk < payloads_.size(); ++chunk) {
        const int rank = job_->layout().chunks()[chunk].rank;
        const absl::Span<const std::byte> piece(payloads_[chunk]);
        const auto index = static_cast<int64_t>(chunk);
        ends[rank].Update(streams_[rank]->StopProvisional({1, 1}, micro_step, {index}).status());
        ends[rank].Update(streams_[rank]
                              ->Contribute({.step = 1,
                                            .attempt = 1,
                                            .chunk = index,
                                            .micro_step_begin = micro_step,
                                            .micro_step_end = micro_step + 1,
                                            .final = micro_step == 1,
                                            .may_guess = micro_step == 0,
                                            .payload = {&piece, 1}})
                              .status());
      }
      for (size_t rank = 0; rank < streams_.size(); ++rank) {
        ends[rank].Update(streams_[rank]->EndMicroStep({1, 1}, micro_step, {}));
      }
    }
    for (size_t rank = 0; rank < streams_.size(); ++rank) {
      ends[rank].Update(streams_[rank]->Seal({1, 1}, 2, std::nullopt).status());
    }
    for (size_t rank = 0; rank < streams_.size(); ++rank) {
      listeners_[rank]->AwaitNorm();
      ends[rank].Update(streams_[rank]->Vote({1, 1}, {}));
    }
    for (size_t rank = 0; rank < streams_.size(); ++rank) {
      const absl::Status heard = listeners_[rank]->AwaitCommit(1);
      if (!heard.ok()) ends[rank] = heard;  // It says what the calls after it say.
    }
    left_until_failure = -1;
    return ends;
  }
  Job& job() { return *job_; }
  void Detach() { streams_.clear(); }

 private:
  const std::shared_ptr<Job> job_;
  JobDriver values_;
  std::vector<std::vector<std::byte>> payloads_;
  std::vector<std::shared_ptr<QuietListener>> listeners_;
  std::vector<std::unique_ptr<RankStream>> streams_;
};

// The job breaks, for want of memory, in the seal of that rank.
void BreakBySeal(JobDriver& driver, int rank) {
  failures = 0;
  left_until_failure = 0;
  const absl::Status broken = driver.stream(rank).Seal(1, 1).status();
  left_until_failure = -1;
  EXPECT_EQ(failures, 1);
  EXPECT_EQ(ReasonOf(broken), reason::kJobBroken);
}

class JobMemoryTest : public testing::TestWithParam<UpdateMode> {};

TEST_P(JobMemoryTest, EveryAllocationOfAStepMayFailAndEndsThatJobAlone) {
  Engine engine({.memory_limit_bytes = int64_t{256} << 20, .threads = 2});
  std::string expected;  // Of an undisturbed step of the victim.
  {
    Victim victim(engine, SpecOf(GetParam(), "undisturbed"));
    for (const absl::Status& end : victim.Step()) ASSERT_TRUE(end.ok()) << end;
    expected = victim.job().StateHash();
    victim.Detach();
    ASSERT_TRUE(engine.CloseJob("undisturbed").ok());
  }
  JobDriver honest(engine, SpecOf(GetParam(), "honest"));
  JobDriver alone(engine, SpecOf(GetParam(), "alone"));
  for (JobDriver* each : {&honest, &alone}) {
    each->UploadWeights();
    each->AttachAll();
  }
  const int64_t used_before = engine.memory().used_bytes();
  int broken = 0, whole = 0;
  for (int64_t index = 0;; ++index) {
    SCOPED_TRACE(testing::Message() << "allocation " << index);
    ASSERT_LT(index, 5000) << "a step allocates without end";
    const uint64_t seed = 10 + index;
    honest.BeginAll();
    honest.SendAll(seed, 0);
    Victim victim(engine, SpecOf(GetParam(), "victim"));
    failures = 0;
    const std::vector<absl::Status> ends = victim.Step(index);
    honest.SendAll(seed + 1, 1, /*final=*/true);
    honest.EndMicroStepAll(0);
    honest.EndMicroStepAll(1);
    honest.SealAll(2);
    alone.Step(seed, 2);
    const JobStatus status = victim.job().Status();
    const bool is_broken = status.phase == JobPhase::kBroken;
    EXPECT_EQ(status.problem.empty(), !is_broken);
    if (!is_broken) {
      ++whole;  // Only speed was lost, or no allocation failed.
      for (const absl::Status& end : ends) EXPECT_TRUE(end.ok()) << end;
      EXPECT_EQ(victim.job().StateHash(), expected);
    } else {
      ++broken;
      const auto says_so = [](const absl::Status& status) {
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr("job victim is broken"));
        EXPECT_EQ(ReasonOf(status), reason::kJobBroken);
      };
      for (const absl::Status& end : ends) {
        if (!end.ok()) says_so(end);  // Otherwise it had heard of the commit before.
      }
      // Nothing of it goes on.
      says_so(victim.job().Attach({.rank = 0, .process_id = "new"}).status());
      says_so(victim.job().TakeSnapshot({0}).status());
      says_so(victim.job().AbortStep().status());
    }
    victim.Detach();
    ASSERT_TRUE(engine.CloseJob("victim").ok());
    if (failures == 0) break;  // The step has no more allocations.
  }
  EXPECT_GT(broken, 20);
  EXPECT_GT(whole, 0);
  EXPECT_EQ(honest.job().StateHash(), alone.job().StateHash());
  EXPECT_EQ(honest.job().Status().committed_step, alone.job().Status().committed_step);
  // The memory of broken jobs is free again, once what still ran of them has ended.
  while (engine.memory().used_bytes() > used_before) std::this_thread::yield();
}

TEST(RunningUpdateMemoryTest, ACallThatWaitsForOneIsAnsweredWhenItsJobBreaks) {
  HeldUpdates held;
  Engine engine({.memory_limit_bytes = int64_t{256} << 20, .threads = 2});
  JobDriver driver(engine, SpecOf(UpdateMode::kSpeculate, "held"));
  driver.UploadWeights();
  driver.AttachAll();
  driver.BeginAll();
  const int64_t chunk = driver.layout().chunks_of_rank(0).front();
  const std::vector<std::byte> bytes = driver.Encode(0, driver.Values(0, 1));
  const absl::Span<const std::byte> piece(bytes);
  ASSERT_TRUE(
      driver.stream(0)
          .Contribute({.step = 1, .chunk = chunk, .may_guess = true, .payload = {&piece, 1}})
          .ok());
  held.AwaitHeld(1);
  Outcome<bool> stopped;
  driver.stream(0).StopProvisional(1, 1, {chunk}, stopped.done());
  ASSERT_FALSE(stopped.ready());
  BreakBySeal(driver, 1);
  ASSERT_TRUE(stopped.ready());
  EXPECT_EQ(ReasonOf(stopped.Get().status()), reason::kJobBroken);
  held.Release();
}

TEST(FirstStateMemoryTest, ABeginThatCannotBeKeptIsUndoneAndMayBeTriedAgain) {
  KeeperForTwo keeper;
  NamedMemory memory(keeper);
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &memory});
  JobDriver driver(engine, MakeJobSpec({.group_sizes = {{700}}, .chunk_elements = 256}));
  driver.AttachAll();
  const FirstState state = {.step = 5, .update_counts = {5}};
  const auto begin = [&state](Job& job) {
    return job.BeginFirstWeights(
        {.rank = 0, .process_id = "process0", .generation = job.Status().generation}, state);
  };
  int tried = 0;
  absl::StatusOr<Job::Uploader> uploader = absl::UnknownError("");
  for (failures = 1; failures > 0; ++tried) {
    failures = 0;
    left_until_failure = tried;
    try {
      uploader = begin(driver.job());
    } catch (const std::bad_alloc&) {
    }
    left_until_failure = -1;
  }
  EXPECT_GT(tried, 5);
  ASSERT_TRUE(uploader.ok()) << uploader.status();
  ASSERT_TRUE(driver.Write(0, driver.StateOf(0, true), *uploader).ok());

  // The next process knows of the state that the first chunk is of.
  NamedMemory left(keeper);
  Engine next({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &left});
  ASSERT_EQ(next.TakeOverJobs().back.size(), 1u);
  JobDriver again(next.FindJob("job").value());
  again.Reopen(0);
  uploader = begin(again.job());
  ASSERT_TRUE(uploader.ok()) << uploader.status();
  for (const int chunk : {1, 2}) {
    ASSERT_TRUE(again.Write(chunk, again.StateOf(chunk, true), *uploader).ok());
  }
  EXPECT_EQ(again.job().Status().phase, JobPhase::kReady);
  EXPECT_EQ(again.job().Status().committed_step, 5u);
}

TEST(UpdateGroupMemoryTest, AChangeThatCannotBeKeptIsNotInForceThenOrLater) {
  KeeperForTwo keeper;
  NamedMemory memory(keeper);
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &memory});
  JobSpec spec = MakeJobSpec({.group_sizes = {{700}}, .chunk_elements = 256});
  spec.keep_previous = true;
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  driver.AttachAll();
  const double before = spec.groups[0].hyper_parameters.lr;
  const HyperParameterOverrides changes = {.lr = 2 * before};
  const auto lr = [&driver] { return driver.job().Status().hyper_parameters[0].lr; };
  // Of the ranks that the record has, and of its bytes.
  const auto fail = [&] {
    // What comes after a commit allocates, too.
    while (engine.tasks().use().tasks > 0) std::this_thread::yield();
    for (const int64_t failing : {0, 1}) {
      bool thrown = false;
      left_until_failure = failing;
      try {
        (void)driver.job().UpdateGroup(0, changes);
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      left_until_failure = -1;
      EXPECT_TRUE(thrown) << "allocation " << failing;
      EXPECT_EQ(lr(), before) << "allocation " << failing;
    }
  };
  driver.Step(1);
  driver.BeginAll();
  fail();
  driver.SendAll(2, 0, /*final=*/true);
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  EXPECT_EQ(lr(), before) << "after the step in which it was to be changed";
  fail();
  ASSERT_TRUE(driver.job().UndoStep().ok());
  EXPECT_EQ(lr(), before) << "after the last step was undone";
  ASSERT_TRUE(driver.job().UpdateGroup(0, changes).ok());
  EXPECT_EQ(lr(), 2 * before);
}

TEST(BrokenJobMemoryTest, ClosedWhileSomebodyHoldsItIsNoJobToTheNextProcess) {
  KeeperForTwo keeper;
  NamedMemory memory(keeper);
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &memory});
  JobDriver holder(engine, MakeJobSpec({.group_sizes = {{700}}, .chunk_elements = 256}));
  holder.UploadWeights();
  holder.AttachAll();
  holder.BeginAll();
  BreakBySeal(holder, 0);
  ASSERT_FALSE(HasFailure());
  ASSERT_TRUE(engine.CloseJob("job").ok());
  ASSERT_FALSE(keeper.kept().empty());

  NamedMemory left(keeper);
  Engine next({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &left});
  const Engine::TakenOver taken = next.TakeOverJobs();
  EXPECT_TRUE(taken.back.empty());
  EXPECT_TRUE(taken.lost.empty());
  EXPECT_TRUE(taken.left.empty());
  EXPECT_EQ(next.FindJob("job").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(keeper.kept().empty());
}

TEST(LookMemoryTest, ThatCannotBeginTakesNoOthersPlace) {
  Engine engine({.memory_limit_bytes = int64_t{1} << 20, .threads = 1});
  using Found = std::vector<FoundCheckpoint>;
  const Engine::LookRequest request = {.path = "/there/is/no/such/folder"};
  // More often than there are places: of the look itself, and of its task.
  for (int64_t i = 0; i < 10; ++i) {
    Engine::LookRequest asked = request;
    Done<Found> done = [](const absl::StatusOr<Found>&) { ADD_FAILURE() << "it has begun"; };
    bool thrown = false;
    left_until_failure = i % 2;
    try {
      engine.LookForCheckpoints(std::move(asked), std::move(done));
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    left_until_failure = -1;
    EXPECT_TRUE(thrown) << "allocation " << i % 2;
  }
  const absl::StatusOr<Found> found =
      Await<Found>([&](Done<Found> done) { engine.LookForCheckpoints(request, std::move(done)); });
  EXPECT_EQ(found.status().code(), absl::StatusCode::kNotFound) << found.status();
}

INSTANTIATE_TEST_SUITE_P(BothModes, JobMemoryTest,
                         testing::Values(UpdateMode::kWait, UpdateMode::kSpeculate),
                         [](const auto& mode) {
                           return mode.param == UpdateMode::kWait ? "Wait" : "Speculate";
                         });

}  // namespace
}  // namespace ballast
