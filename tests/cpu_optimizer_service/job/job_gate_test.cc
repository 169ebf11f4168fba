// What waits in a job's gate waits without a thread: every call below is made from the test's own
// thread while a disk hangs, so a call that blocked would end the test by its time limit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/job/slow_disk.h"

namespace ballast {
namespace {

using testing::HasSubstr;

// The result of a call, once its Done has been called. Outlives the call.
template <typename T>
class Outcome {
 public:
  Done<T> done() {
    return [this](absl::StatusOr<T> result) { promise_.set_value(std::move(result)); };
  }
  bool ready() const {
    return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  // Waits for it.
  absl::StatusOr<T> Get() { return future_.get(); }

 private:
  std::promise<absl::StatusOr<T>> promise_;
  std::future<absl::StatusOr<T>> future_ = promise_.get_future();
};

class JobGateTest : public testing::Test {
 protected:
  JobGateTest() : driver_(engine_, Spec("slow")), other_(engine_, Spec("other")) {
    for (JobDriver* driver : {&driver_, &other_}) {
      driver->UploadWeights();
      driver->AttachAll();
      driver->Step(1);
    }
  }
  ~JobGateTest() override { disk_.Release(); }

  static JobSpec Spec(const std::string& name) {
    return MakeJobSpec({.group_sizes = {{3000}}, .world_size = 2, .chunk_elements = 512}, name);
  }
  // A save that hangs until the disk is released.
  void StartSave() {
    disk_.HoldUp();
    driver_.job().Save("/checkpoint", saved_.done());
    disk_.AwaitHeldUp();
  }
  // The next step, sealed by all ranks; its decision waits for the save.
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
  Engine engine_{{.memory_limit_bytes = int64_t{1} << 30, .threads = 2, .file_system = &disk_}};
  JobDriver driver_;
  JobDriver other_;
};

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
  EXPECT_THAT(older.Get().status().message(), HasSubstr("is at generation 1, not 7"));
  request.generation = 1;
  request.process_id = "another";
  Outcome<std::unique_ptr<RankStream>> another;
  driver_.job().OpenStream(request, std::make_shared<RecordingListener>(), another.done());
  ASSERT_TRUE(another.ready());
  EXPECT_THAT(another.Get().status().message(), HasSubstr("is not held by this process"));
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

TEST_F(JobGateTest, SnapshotsAndShardsAreReadWhileTheJobIsSaved) {
  StartSave();
  EXPECT_TRUE(driver_.job().TakeSnapshot(std::vector<int>{0}).ok());
  std::vector<std::byte> shard(512 * 2);
  EXPECT_EQ(driver_.job().ReadShard(1, 1, 0, absl::MakeSpan(shard)), absl::OkStatus());
}

TEST_F(JobGateTest, EveryCallIsAnsweredWhileALoadHangs) {
  ASSERT_TRUE(driver_.job().Save("/checkpoint").ok());
  disk_.HoldUp();
  Outcome<CheckpointInfo> loaded;
  driver_.job().Load("/checkpoint", loaded.done());
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

TEST_F(JobGateTest, FirstWeightsOfAnOlderGenerationAreRefusedAtOnce) {
  JobDriver young(engine_, Spec("young"));
  const uint64_t generation = young.job().Attach({.rank = 0, .process_id = "old"})->generation;
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
