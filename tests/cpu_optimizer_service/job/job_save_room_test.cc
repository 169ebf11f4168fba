// The memory that a save beside steps wants of a job in named memory: it is made by a thread of the
// disk's, and nothing but a decision waits for it.
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/host/keeper_for_two.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/job/slow_disk.h"
#include "tests/support/eventually.h"

namespace ballast {
namespace {

// Tells when a batch of slots is being made, before it is.
class KeeperOfBatches final : public KeeperForTwo {
 public:
  absl::StatusOr<FileDescriptor> MakeFile(const std::string& name, int64_t bytes) override {
    if (absl::StrContains(name, "/versions ")) on_batch();
    return KeeperForTwo::MakeFile(name, bytes);
  }
  absl::Status Keep(const std::string& name, int descriptor) override {
    MutexLock lock(mutex_);
    return KeeperForTwo::Keep(name, descriptor);
  }
  void Drop(const std::string& name) override {
    MutexLock lock(mutex_);
    KeeperForTwo::Drop(name);
  }
  struct Batches {
    int count = 0;
    int64_t bytes_without_pages = 0;
  };
  Batches batches() const {
    MutexLock lock(mutex_);
    Batches found;
    for (const auto& [name, file] : kept()) {
      struct stat facts = {};
      if (!absl::StrContains(name, "/versions ") || fstat(file.number(), &facts) != 0) continue;
      ++found.count;
      found.bytes_without_pages += std::max<int64_t>(0, facts.st_size - facts.st_blocks * 512);
    }
    return found;
  }

  std::function<void()> on_batch = [] {};

 private:
  mutable Mutex mutex_;
};

class JobSaveRoomTest : public testing::Test {
 protected:
  static constexpr int kEvery = 3;

  std::unique_ptr<JobDriver> NewJob() {
    auto driver = std::make_unique<JobDriver>(
        engine_, MakeJobSpec({.group_sizes = {{100'000}}, .chunk_elements = 4096}));
    driver->UploadWeights();
    driver->AttachAll();
    return driver;
  }
  // Whether the job answers while a batch is made; if it does not, the batch is made all the same.
  bool Answers(Job& job) {
    auto answered = std::make_shared<std::promise<void>>();
    std::thread([&job, answered] {
      (void)job.Status();
      answered->set_value();
    }).detach();
    return answered->get_future().wait_for(std::chrono::minutes(2)) == std::future_status::ready;
  }
  std::set<std::string> Saved() {
    const auto names = disk_.List("/saved/job").value_or(std::vector<std::string>());
    return {names.begin(), names.end()};
  }
  static void AwaitNoSave(Job& job) {
    while (!job.Status().saves.empty()) std::this_thread::yield();
  }

  SlowDisk disk_;
  std::unique_ptr<CheckpointDirectory> directory_ =
      CheckpointDirectory::Open(disk_, "/saved", {.every_steps = kEvery}).value();
  KeeperOfBatches keeper_;
  NamedMemory memory_{keeper_};
  Engine engine_{{.memory_limit_bytes = int64_t{64} << 20,
                  .threads = 2,
                  .named_memory = &memory_,
                  .file_system = &disk_,
                  .checkpoints = directory_.get()}};
};

TEST_F(JobSaveRoomTest, IsMadeBeforeTheSaveIsDueWhileTheStepGoesOn) {
  const auto driver = NewJob();
  std::promise<bool> answers;
  std::promise<void> may_go_on;
  keeper_.on_batch = [&] {
    answers.set_value(Answers(driver->job()));
    may_go_on.get_future().wait();
    keeper_.on_batch = [] { ADD_FAILURE() << "there was room already"; };
  };
  disk_.HoldUp();
  for (int step = 1; step < kEvery; ++step) driver->Step(step);
  std::future<bool> answer = answers.get_future();
  ASSERT_EQ(answer.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  ASSERT_TRUE(answer.get());
  driver->BeginAll();
  driver->SendAll(kEvery, 0, /*final=*/true);
  driver->EndMicroStepAll(0);
  may_go_on.set_value();
  while (keeper_.batches().count == 0) std::this_thread::yield();
  driver->SealAll(1);
  disk_.AwaitHeldUp();
  EXPECT_EQ(keeper_.batches().bytes_without_pages, 0);
  driver->Step(kEvery + 1);  // Beside the save.
  disk_.Release();
  AwaitNoSave(driver->job());
  EXPECT_THAT(Saved(), testing::Contains("step-3.1"));
}

// No step in between had been there to make it: a decision waits, and what is saved is the step that
// the save was asked for at.
TEST_F(JobSaveRoomTest, HoldsBackADecisionAloneIfASaveComesUnexpected) {
  const auto driver = NewJob();
  driver->Step(1);
  std::promise<bool> answers;
  std::promise<void> may_go_on;
  keeper_.on_batch = [&] {
    answers.set_value(Answers(driver->job()));
    may_go_on.get_future().wait();
    keeper_.on_batch = [] {};
  };
  std::promise<CheckpointInfo> saved;
  std::thread save([&] {
    driver->job().Save({.folder = "/saved/job"}, [&](absl::StatusOr<CheckpointInfo> info) {
      saved.set_value(std::move(info).value());
    });
  });
  const bool answered = answers.get_future().get();
  EXPECT_TRUE(answered);
  if (answered) {
    driver->BeginAll();
    driver->SendAll(2, 0, /*final=*/true);
    driver->EndMicroStepAll(0);
    EXPECT_FALSE(driver->Seal(0, 1).has_value());
    const JobStatus status = driver->job().Status();
    EXPECT_EQ(status.phase, JobPhase::kSealed);
    EXPECT_THAT(status.saves, testing::ElementsAre(testing::AllOf(
                                  testing::Field(&SaveProgress::holds_back_decisions, true),
                                  testing::Field(&SaveProgress::makes_memory, true))));
    EXPECT_THAT(status.activities,
                testing::ElementsAre(testing::AllOf(
                    testing::Field(&Activity::kind, ActivityKind::kMakingSecondVersions),
                    testing::Field(&Activity::total_bytes, testing::Ge(status.memory.state_bytes)),
                    testing::Field(&Activity::done_bytes, 0))));
  }
  disk_.HoldUp();
  may_go_on.set_value();
  save.join();
  disk_.AwaitHeldUp();
  // Without an assertion that ends the test here: the disk is held up.
  const JobStatus writing = driver->job().Status();
  EXPECT_THAT(writing.saves, testing::ElementsAre(testing::AllOf(
                                 testing::Field(&SaveProgress::makes_memory, false),
                                 testing::Field(&SaveProgress::holds_back_decisions, false))));
  // Step 2 may be over by now, and then memory is made for the save that is due next.
  EXPECT_THAT(writing.activities,
              testing::Contains(
                  testing::AllOf(testing::Field(&Activity::kind, ActivityKind::kWritingCheckpoint),
                                 testing::Field(&Activity::directory, "/saved/job"))));
  if (answered) driver->listener(0).WaitForCommit(2);  // Beside the save.
  disk_.Release();
  EXPECT_EQ(saved.get_future().get().step, 1u);
  EXPECT_THAT(Saved(), testing::Contains("step-1.1"));
}

TEST_F(JobSaveRoomTest, IsGivenBackWithTheSave) {
  const auto driver = NewJob();
  for (int step = 1; step <= 3 * kEvery; ++step) {
    driver->Step(step);
    AwaitNoSave(driver->job());
    // It is made beside the step before the save, and goes soon after the save's end is told.
    const bool wanted = step % kEvery == kEvery - 1;
    ASSERT_TRUE(Eventually([&] { return (keeper_.batches().count > 0) == wanted; })) << step;
  }
  EXPECT_THAT(Saved(), testing::IsSupersetOf({"step-3.1", "step-6.1", "step-9.1"}));
  driver->Step(3 * kEvery + 1);  // Which needs none.
  EXPECT_EQ(keeper_.batches().count, 0);
}

}  // namespace
}  // namespace ballast
