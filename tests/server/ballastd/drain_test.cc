#include "server/ballastd/drain.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>

#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Drain : public TinyJobTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(TinyJobTest::SetUp());
    std::filesystem::create_directories(directory_);
    Step(1);
  }
  ~Drain() override { std::filesystem::remove_all(directory_); }

  const std::string directory_ = testing::TempDir() + "ballast_drain_" + std::to_string(getpid());
};

TEST_F(Drain, SavesAJobBetweenSteps) {
  const DrainReport report = DrainAndSave(service_.engine(), 0, directory_);
  EXPECT_THAT(report.aborted, IsEmpty());
  EXPECT_THAT(report.lost, IsEmpty());
  EXPECT_THAT(report.saved, ElementsAre(HasSubstr("job tiny at step 1: ")));
}

TEST_F(Drain, AbortsAnUndecidedStepSoThatNothingCommitsAfterTheSave) {
  const std::string hash = service_.StateHash("tiny");
  first_.Begin(2);
  first_.ReadUntilAcknowledged();
  const DrainReport report = DrainAndSave(service_.engine(), 0, directory_);
  ASSERT_THAT(report.aborted, ElementsAre(AllOf(HasSubstr("tiny"), HasSubstr("step 2"))));
  EXPECT_THAT(report.saved, ElementsAre(HasSubstr("job tiny at step 1: ")));

  for (TestWorker* worker : {&first_, &second_}) {
    EXPECT_EQ(worker->ReadUntilEnd().error_code(), grpc::StatusCode::ABORTED);
  }
  TestWorker again(service_, "tiny", 0, Codec::kFrames);
  ASSERT_TRUE(again.Attach().ok());
  again.OpenStream();
  again.Begin(2);
  EXPECT_EQ(again.ReadUntilEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(service_.StateHash("tiny"), hash);
}

}  // namespace
}  // namespace ballast::server
