// What waits in a job's gate waits without a thread: every call below is made from the test's own
// thread while a disk hangs, so a call that blocked would end the test by its time limit.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/job/outcome.h"
#include "tests/cpu_optimizer_service/job/slow_disk.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class SlowDiskTest : public testing::Test {
 protected:
  explicit SlowDiskTest(int64_t memory_bytes)
      : engine_({.memory_limit_bytes = memory_bytes, .threads = 2, .file_system = &disk_}),
        driver_(engine_, Spec("slow")),
        other_(engine_, Spec("other")) {
    for (JobDriver* driver : {&driver_, &other_}) {
      driver->UploadWeights();
      driver->AttachAll();
      driver->Step(1);
    }
  }
  ~SlowDiskTest() override { disk_.Release(); }

  static JobSpec Spec(const std::string& name) {
    return MakeJobSpec({.group_sizes = {{3000}}, .world_size = 2, .chunk_elements = 512}, name);
  }
  static constexpr int kPlanes = 3;
  // A save that hangs until the disk is released.
  void StartSave() {
    disk_.HoldUp();
    driver_.job().Save({.folder = "/checkpoint"}, saved_.done());
    disk_.AwaitHeldUp(kPlanes);
  }
  // The next step, sealed by all ranks.
  void SealNextStep() {
    const uint64_t step = driver_.next_step();
    driver_.BeginAll();
    driver_.SendAll(7, 0, /*final=*/true);
    driver_.EndMicroStepAll(0);
    for (int rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(driver_.stream(rank).Seal(step, 1).value(), std::nullopt);
    }
  }
  AttachRequest AttachAs(const std::string& process_id) {
    return {.rank = 0, .process_id = process_id};
  }

  Outcome<CheckpointInfo> saved_;
  SlowDisk disk_;
  Engine engine_;
  JobDriver driver_;
  JobDriver other_;
};

// Without memory for second versions, a save holds back the decision.
class JobGateTest : public SlowDiskTest {
 protected:
  JobGateTest() : SlowDiskTest(2 * BytesOf(Spec("slow"))) {}

  static int64_t BytesOf(const JobSpec& spec) {
    return NeedOf(spec, Layout::Create(spec.layout).value()).total_bytes();
  }
};

// With it, it holds back nothing.
class JobSaveTest : public SlowDiskTest {
 protected:
  JobSaveTest() : SlowDiskTest(int64_t{1} << 30) {}
};

TEST_F(JobSaveTest, TheJobGoesOnWhileItIsSavedAndTheStepOfTheSaveIsWritten) {
  const std::string hash = driver_.job().StateHash();
  const int64_t used_bytes = engine_.memory().used_bytes();
  StartSave();
  SealNextStep();
  driver_.listener(0).WaitForCommit(2);
  driver_.Step(3);
  EXPECT_EQ(driver_.job().Attach(AttachAs("another")).value().committed_step, 3u);
  const JobStatus status = driver_.job().Status();
  ASSERT_EQ(status.saves.size(), 1u);
  EXPECT_EQ(status.saves[0].directory, "/checkpoint");
  EXPECT_EQ(status.saves[0].step, 1u);
  EXPECT_EQ(status.saves[0].size_bytes, 3 * 3000 * 4);
  EXPECT_FALSE(status.saves[0].holds_back_decisions);
  EXPECT_GT(status.saves[0].seconds_since_progress, 0);
  EXPECT_FALSE(saved_.ready());

  disk_.Release();
  EXPECT_EQ(saved_.Get().value().step, 1u);
  EXPECT_TRUE(driver_.job().Status().saves.empty());
  driver_.DetachAll();
  driver_.AttachAll();
  driver_.Step(4);  // Chunks go back to where they were.
  EXPECT_EQ(engine_.memory().used_bytes(), used_bytes);
  ASSERT_TRUE(driver_.job().Load("/checkpoint").ok());
  EXPECT_EQ(driver_.job().StateHash(), hash);
}

// With whatever nice value this process has: a step's threads have it, too.
TEST_F(JobSaveTest, LeavesTheProcessorsToStepsWhereTheyGoOnBesideIt) {
  const std::set<int> lowest = {19};
  const std::set<int> own = {getpriority(PRIO_PROCESS, 0)};
  ASSERT_NE(own, lowest) << "run this test at a higher priority";
  ASSERT_TRUE(driver_.job().Save("/checkpoint").ok());
  EXPECT_EQ(disk_.TakeNices(), lowest);
  ASSERT_TRUE(engine_.Drain(/*seconds=*/0));
  ASSERT_TRUE(driver_.job().Save("/checkpoint").ok());
  EXPECT_EQ(disk_.TakeNices(), own) << "at the service's end nothing goes on beside it";
}

TEST_F(JobGateTest, ASaveThatHoldsBackDecisionsDoesNotLeaveTheProcessorsToOthers) {
  ASSERT_TRUE(driver_.job().Save("/checkpoint").ok());
  EXPECT_EQ(disk_.TakeNices(), std::set<int>{getpriority(PRIO_PROCESS, 0)});
}

TEST_F(JobSaveTest, FewSavesOfAJobAtOnceAlsoToTheSameFolder) {
  StartSave();
  std::vector<Outcome<CheckpointInfo>> others(kMostSaves);
  for (size_t i = 0; i < kMostSaves; ++i) {
    driver_.job().Save({.folder = "/checkpoint"}, others[i].done());
  }
  ASSERT_TRUE(others.back().ready());
  EXPECT_EQ(others.back().Get().status().code(), absl::StatusCode::kResourceExhausted);
  // What the service saves by itself, at its end for one, does not wait for what people ask for.
  Outcome<CheckpointInfo> by_itself;
  driver_.job().Save({.folder = "/checkpoint", .asked_for = false}, by_itself.done());
  EXPECT_FALSE(by_itself.ready());
  disk_.Release();
  for (size_t i = 0; i + 1 < kMostSaves; ++i) EXPECT_TRUE(others[i].Get().ok()) << i;
  EXPECT_TRUE(by_itself.Get().ok());
}

TEST_F(JobSaveTest, InTheBackgroundItAnswersWhenItHasBegun) {
  const std::string hash = driver_.job().StateHash();
  disk_.HoldUp();
  Outcome<CheckpointInfo> saved;
  driver_.job().Save({.folder = "/checkpoint", .background = true}, saved.done());
  ASSERT_TRUE(saved.ready());  // Though the disk hangs.
  const absl::StatusOr<CheckpointInfo> begun = saved.Get();
  EXPECT_EQ(begun->step, 1u);
  EXPECT_EQ(begun->directory, "/checkpoint");
  EXPECT_EQ(driver_.job().Status().saves.size(), 1u);
  driver_.Step(2);
  disk_.Release();
  while (!driver_.job().Status().saves.empty()) std::this_thread::yield();
  EXPECT_EQ(driver_.job().Load("/checkpoint")->step, 1u);
  EXPECT_EQ(driver_.job().StateHash(), hash);
}

TEST_F(JobSaveTest, CallersThatGiveUpBeforeTheDiskHasTimeForThemFreeWhatTheyHave) {
  JobDriver third(engine_, Spec("third"));
  third.UploadWeights();
  third.AttachAll();
  third.Step(1);
  ASSERT_TRUE(other_.job().Save("/loadable").ok());
  disk_.HoldUpDirectories();
  constexpr int kDiskThreads = 16;
  std::vector<Outcome<CheckpointInfo>> others(kDiskThreads);
  for (int i = 0; i < kDiskThreads; ++i) {
    // Of each job as many as may be at once.
    JobDriver& driver = i % 2 == 0 ? driver_ : third;
    driver.job().Save({.folder = absl::StrCat("/", i), .asked_for = i % 4 < 2}, others[i].done());
  }
  disk_.AwaitHeldUp(kDiskThreads);  // All that save.
  disk_.HoldUp();
  std::vector<Outcome<CheckpointInfo>> loads(kDiskThreads);
  for (Outcome<CheckpointInfo>& each : loads) third.job().Load({.path = "/loadable"}, each.done());
  disk_.AwaitHeldUp(2 * kDiskThreads);  // And all that load.
  const int64_t used_bytes = engine_.memory().used_bytes();
  const size_t under_way = other_.job().Status().saves.size();

  other_.Step(2);  // The next save pins other versions.
  Outcome<CheckpointInfo> save, load;
  const Pending pending_save = other_.job().Save({.folder = "/late"}, save.done());
  const Pending pending_load = other_.job().Load({.path = "/loadable"}, load.done());
  EXPECT_EQ(other_.job().Status().saves.size(), under_way + 1);
  EXPECT_GT(engine_.memory().used_bytes(), used_bytes);
  ASSERT_FALSE(save.ready() || load.ready());
  pending_save.Cancel();
  pending_load.Cancel();
  ASSERT_TRUE(save.ready() && load.ready());
  EXPECT_EQ(save.Get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(load.Get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(other_.job().Status().saves.size(), under_way);
  EXPECT_EQ(engine_.memory().used_bytes(), used_bytes);
  disk_.Release();
  for (Outcome<CheckpointInfo>& other : others) EXPECT_TRUE(other.Get().ok());
  for (Outcome<CheckpointInfo>& each : loads) EXPECT_TRUE(each.Get().ok()) << each.Get().status();
  EXPECT_EQ(other_.job().Status().generation, 1u);
}

TEST_F(JobSaveTest, WhatHoldsUpItsDiskHoldsUpNoLoad) {
  ASSERT_TRUE(other_.job().Save("/loadable").ok());
  disk_.HoldUpDirectories();
  std::vector<Outcome<CheckpointInfo>> saves(2 * kMostSaves);
  for (size_t i = 0; i < saves.size(); ++i) {
    driver_.job().Save({.folder = absl::StrCat("/", i), .asked_for = i < kMostSaves},
                       saves[i].done());
  }
  JobDriver third(engine_, Spec("third"));
  third.UploadWeights();
  std::vector<Outcome<CheckpointInfo>> others(2 * kMostSaves);
  for (size_t i = 0; i < others.size(); ++i) {
    third.job().Save({.folder = absl::StrCat("/third", i), .asked_for = i < kMostSaves},
                     others[i].done());
  }
  disk_.AwaitHeldUp(4 * kMostSaves);
  EXPECT_EQ(other_.job().Load("/loadable")->step, 1u);
  disk_.Release();
  for (Outcome<CheckpointInfo>& save : saves) EXPECT_TRUE(save.Get().ok());
  for (Outcome<CheckpointInfo>& save : others) EXPECT_TRUE(save.Get().ok());
}

// More than the threads beside steps can write at once.
TEST_F(JobSaveTest, TheEndOfTheServiceHurriesThoseThatAreUnderWay) {
  constexpr int kWritingThreads = 16;
  std::vector<Outcome<CheckpointInfo>> saves(kWritingThreads / kPlanes + 1);
  disk_.HoldUp();
  for (size_t i = 0; i < saves.size(); ++i) {
    JobDriver& driver = i % 2 == 0 ? driver_ : other_;
    driver.job().Save({.folder = absl::StrCat("/", i)}, saves[i].done());
  }
  disk_.AwaitHeldUp(kWritingThreads);
  EXPECT_EQ(disk_.TakeNices(), std::set<int>{19});
  ASSERT_TRUE(engine_.Drain(/*seconds=*/0));
  disk_.AwaitHeldUp(kWritingThreads + 1);
  EXPECT_EQ(disk_.TakeNices(), std::set<int>{getpriority(PRIO_PROCESS, 0)});
  disk_.Release();
  for (Outcome<CheckpointInfo>& save : saves) EXPECT_TRUE(save.Get().ok());
}

TEST_F(JobGateTest, ASaveWithoutMemoryForSecondVersionsSaysThatItHoldsBackDecisions) {
  StartSave();
  ASSERT_EQ(driver_.job().Status().saves.size(), 1u);
  EXPECT_TRUE(driver_.job().Status().saves[0].holds_back_decisions);
}

TEST_F(JobGateTest, ACancelledSaveThatWaitsForADecisionDoesNothing) {
  StartSave();
  SealNextStep();
  Outcome<CheckpointInfo> second;
  const Pending pending = driver_.job().Save({.folder = "/second"}, second.done());
  ASSERT_FALSE(second.ready());
  pending.Cancel();
  ASSERT_TRUE(second.ready());
  EXPECT_EQ(second.Get().status().code(), absl::StatusCode::kCancelled);
  disk_.Release();
  driver_.listener(0).WaitForCommit(2);
  EXPECT_FALSE(disk_.Exists("/second"));
}

TEST_F(JobGateTest, AnotherJobTrainsWhileADiskHangs) {
  StartSave();
  for (uint64_t step = 2; step < 12; ++step) other_.Step(step);
  EXPECT_EQ(other_.job().Status().committed_step, 11u);
  EXPECT_FALSE(saved_.ready());
  disk_.Release();
  EXPECT_EQ(saved_.Get().value().step, 1u);
}

TEST_F(JobGateTest, AStepGoesUpToItsDecisionWhileTheJobIsSaved) {
  StartSave();
  SealNextStep();
  EXPECT_EQ(driver_.job().Status().phase, JobPhase::kSealed);
  EXPECT_EQ(driver_.job().Status().committed_step, 1u);
  disk_.Release();
  driver_.listener(0).WaitForCommit(2);
  EXPECT_EQ(saved_.Get().value().step, 1u);
}

TEST_F(JobGateTest, AttachingWaitsForTheDecisionWithoutAThread) {
  StartSave();
  SealNextStep();
  Outcome<Attachment> attached;
  driver_.job().Attach(AttachAs("process0"), attached.done());
  EXPECT_FALSE(attached.ready());
  disk_.Release();
  EXPECT_EQ(attached.Get().value().committed_step, 2u) << "what was sealed rolled forward first";
}

TEST_F(JobGateTest, ACancelledAttachingDoesNothing) {
  StartSave();
  SealNextStep();
  Outcome<Attachment> ghost;
  const Pending pending = driver_.job().Attach(AttachAs("ghost"), ghost.done());
  ASSERT_FALSE(ghost.ready());
  pending.Cancel();
  ASSERT_TRUE(ghost.ready());
  EXPECT_EQ(ghost.Get().status().code(), absl::StatusCode::kCancelled);
  pending.Cancel();
  disk_.Release();
  driver_.listener(0).WaitForCommit(2);
  EXPECT_EQ(driver_.job().Status().ranks[0].process_id, "process0");
  EXPECT_EQ(driver_.job().Status().generation, 1u);
}

TEST_F(JobGateTest, AStreamThatCannotBeOpenedIsRefusedAtOnce) {
  StartSave();
  SealNextStep();
  OpenStreamRequest request = {
      .uid = driver_.job().uid(), .rank = 0, .process_id = "process0", .generation = 7};
  Outcome<std::unique_ptr<RankStream>> older;
  driver_.job().OpenStream(request, std::make_shared<RecordingListener>(), older.done());
  ASSERT_TRUE(older.ready());
  EXPECT_TRUE(Refused(older.Get(), absl::StatusCode::kAborted, reason::kOlderGeneration));
  request.generation = 1;
  request.process_id = "another";
  Outcome<std::unique_ptr<RankStream>> another;
  driver_.job().OpenStream(request, std::make_shared<RecordingListener>(), another.done());
  ASSERT_TRUE(another.ready());
  EXPECT_TRUE(Refused(another.Get(), absl::StatusCode::kAborted, reason::kRankReplaced));
}

TEST_F(JobGateTest, AStreamWaitsForTheDecisionAndCanBeCancelled) {
  StartSave();
  SealNextStep();
  const OpenStreamRequest request = {
      .uid = driver_.job().uid(), .rank = 0, .process_id = "process0", .generation = 1};
  Outcome<std::unique_ptr<RankStream>> given_up;
  const Pending pending =
      driver_.job().OpenStream(request, std::make_shared<RecordingListener>(), given_up.done());
  Outcome<std::unique_ptr<RankStream>> opened;
  driver_.job().OpenStream(request, std::make_shared<RecordingListener>(), opened.done());
  EXPECT_FALSE(given_up.ready() || opened.ready());
  pending.Cancel();
  EXPECT_EQ(given_up.Get().status().code(), absl::StatusCode::kCancelled);
  disk_.Release();
  const auto stream = opened.Get();
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_EQ((*stream)->position().committed_step, 2u);
}

TEST_F(JobGateTest, ASealedStepIsAbortedWhileTheJobIsSaved) {
  StartSave();
  SealNextStep();
  EXPECT_EQ(driver_.job().AbortStep().value(), 2u);
  EXPECT_EQ(driver_.listener(1).detached().code(), absl::StatusCode::kAborted);
  disk_.Release();
  EXPECT_EQ(saved_.Get().value().step, 1u);
  driver_.DetachAll();
  driver_.AttachAll();
  driver_.Step(2);
}

TEST_F(JobSaveTest, SnapshotsAndShardsAreReadWhileTheJobIsSaved) {
  StartSave();
  EXPECT_TRUE(driver_.job().TakeSnapshot(std::vector<int>{0}).ok());
  std::vector<std::byte> shard(512 * 2);
  EXPECT_EQ(driver_.job().ReadShard(1, 1, 0, absl::MakeSpan(shard)), absl::OkStatus());
}

TEST_F(JobGateTest, EveryCallIsAnsweredWhileALoadHangs) {
  ASSERT_TRUE(driver_.job().Save("/checkpoint").ok());
  disk_.HoldUp();
  Outcome<CheckpointInfo> loaded;
  driver_.job().Load({.path = "/checkpoint"}, loaded.done());
  disk_.AwaitHeldUp();
  // The checkpoint is being verified: the job trains on.
  driver_.Step(2);
  Outcome<Attachment> attached;
  driver_.job().Attach(AttachAs("process0"), attached.done());
  EXPECT_TRUE(attached.Get().ok());
  EXPECT_EQ(driver_.job().Status().committed_step, 2u);
  EXPECT_FALSE(loaded.ready());
  disk_.Release();
  EXPECT_EQ(loaded.Get().value().step, 1u);
  EXPECT_EQ(driver_.job().Status().generation, 2u);
}

TEST_F(JobGateTest, AJobIsClosedWhileItIsSaved) {
  StartSave();
  EXPECT_EQ(engine_.CloseJob("slow"), absl::OkStatus());
  EXPECT_EQ(driver_.listener(0).detached().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver_.job().Attach(AttachAs("process0")).status().code(),
            absl::StatusCode::kNotFound);
  disk_.Release();
  EXPECT_TRUE(saved_.Get().ok());
}

TEST_F(JobSaveTest, FirstWeightsOfAnOlderGenerationAreRefusedAtOnce) {
  JobDriver young(engine_, Spec("young"));
  const Generation generation = young.job().Attach({.rank = 0, .process_id = "old"})->generation;
  ASSERT_TRUE(young.job().Attach({.rank = 0, .process_id = "new"}).ok());
  const std::vector<float> weights = young.Values(0, 1);
  const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(weights.data()),
                                          weights.size() * sizeof(float));
  const auto written = young.job().WriteInitialWeights(
      0, {&piece, 1}, Job::Uploader{.generation = generation, .process_id = "old"});
  EXPECT_EQ(written.status().code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace ballast
