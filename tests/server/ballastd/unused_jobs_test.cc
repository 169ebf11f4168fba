#include "server/ballastd/unused_jobs.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/eventually.h"

namespace ballast::server {
namespace {

namespace fs = std::filesystem;

class UnusedJobsTest : public testing::Test {
 protected:
  ~UnusedJobsTest() override { fs::remove_all(root_); }

  std::unique_ptr<JobDriver> NewJob(int steps) {
    auto driver = std::make_unique<JobDriver>(engine_, MakeJobSpec({}));
    driver->UploadWeights();
    driver->AttachAll();
    for (int step = 1; step <= steps; ++step) driver->Step(step);
    return driver;
  }
  void LookAfter(absl::Duration more) { unused_.Look(now_ += more); }
  bool HasJob() const { return engine_.FindJob("job").ok(); }
  // The step of its newest checkpoint; -1: there is none.
  int64_t SavedStep() const {
    const auto found = engine_.checkpoints()->Find("job");
    return found.has_value() ? static_cast<int64_t>(found->step) : -1;
  }

  const fs::path root_ = testing::TempDir() + "ballast_unused_" + std::to_string(getpid());
  const std::unique_ptr<CheckpointDirectory> directory_ =
      CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value();
  Engine engine_{
      {.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .checkpoints = directory_.get()}};
  UnusedJobs unused_{engine_, absl::Hours(1)};
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(UnusedJobsTest, AJobWithoutRanksIsSavedAndClosedAfterTheTime) {
  auto driver = NewJob(3);
  LookAfter(absl::Hours(5));
  LookAfter(absl::Hours(5));
  EXPECT_TRUE(HasJob());  // Its ranks are there, however long nothing happens.
  driver.reset();
  LookAfter(absl::Seconds(1));
  LookAfter(absl::Minutes(59));
  EXPECT_TRUE(HasJob());
  EXPECT_EQ(SavedStep(), -1);
  LookAfter(absl::Minutes(1));
  EXPECT_FALSE(HasJob());
  EXPECT_EQ(SavedStep(), 3);
  // The thread that has saved it may have it for a moment longer.
  EXPECT_TRUE(Eventually([&] { return engine_.memory().used_bytes() == 0; }));
}

TEST_F(UnusedJobsTest, ARankThatComesAndGoesBeginsTheTimeAnew) {
  auto driver = NewJob(1);
  const std::shared_ptr<Job> job = driver->job().shared_from_this();
  driver.reset();
  LookAfter(absl::Seconds(1));
  LookAfter(absl::Minutes(59));
  // Between two looks, and without a stream.
  ASSERT_TRUE(job->Attach({.rank = 0, .process_id = "another"}).ok());
  LookAfter(absl::Minutes(59));
  LookAfter(absl::Minutes(59));
  EXPECT_TRUE(HasJob());
  LookAfter(absl::Minutes(1));
  EXPECT_FALSE(HasJob());
}

TEST_F(UnusedJobsTest, AStepThatDeadRanksLeftUndecidedIsNotInTheCheckpoint) {
  auto driver = NewJob(1);
  driver->BeginAll();
  driver->SendAll(2, 0);
  driver.reset();
  LookAfter(absl::Seconds(1));
  LookAfter(absl::Hours(1));
  EXPECT_FALSE(HasJob());
  EXPECT_EQ(SavedStep(), 1);
}

TEST_F(UnusedJobsTest, AJobWithoutWeightsIsClosedAndNotSaved) {
  ASSERT_TRUE(engine_.CreateJob(MakeJobSpec({})).ok());
  LookAfter(absl::Seconds(1));
  LookAfter(absl::Hours(1));
  EXPECT_FALSE(HasJob());
  EXPECT_EQ(SavedStep(), -1);
}

TEST_F(UnusedJobsTest, AJobThatCannotBeSavedStaysUntilItCan) {
  NewJob(2).reset();
  std::ofstream(root_ / "job") << "in the way";
  LookAfter(absl::Seconds(1));
  LookAfter(absl::Hours(1));
  EXPECT_TRUE(HasJob());
  fs::remove(root_ / "job");
  LookAfter(absl::Minutes(9));
  EXPECT_TRUE(HasJob());  // Not tried at each look.
  LookAfter(absl::Minutes(1));
  EXPECT_FALSE(HasJob());
  EXPECT_EQ(SavedStep(), 2);
}

TEST_F(UnusedJobsTest, WhoComesDuringTheSaveKeepsTheJob) {
  auto driver = NewJob(1);
  const std::shared_ptr<Job> job = driver->job().shared_from_this();
  driver.reset();
  const Job::Use unused = job->use();
  const auto close = [&](const Job::Use& use) {
    return Await<bool>([&](Done<bool> done) { engine_.CloseUnusedJob(job, use, std::move(done)); })
        .status()
        .code();
  };
  ASSERT_TRUE(job->Attach({.rank = 0, .process_id = "another"}).ok());
  EXPECT_EQ(close(unused), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(HasJob());
  {
    JobDriver again(job);
    again.AttachAll();
    EXPECT_EQ(close(job->use()), absl::StatusCode::kFailedPrecondition);  // It has streams.
    EXPECT_EQ(again.Step(7).step, 2u);
  }
  engine_.Drain(0);  // It saves the job, and must find it.
  EXPECT_EQ(close(job->use()), absl::StatusCode::kFailedPrecondition);
  engine_.EndDrain();
  EXPECT_EQ(close(job->use()), absl::StatusCode::kOk);
  EXPECT_FALSE(HasJob());
}

}  // namespace
}  // namespace ballast::server
