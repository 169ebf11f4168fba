#include "server/cluster/registration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/proto/cluster/fake_etcd.h"
#include "tests/support/eventually.h"
#include "tests/support/messages.h"

namespace ballast::server {
namespace {

using cluster::Cluster;

constexpr char kAddress[] = "a:7070";

class RegistrationTest : public testing::Test {
 protected:
  std::unique_ptr<Cluster> OpenCluster() {
    return Cluster::Open(cluster::ParseAddress("etcd://" + etcd_.address() + "/ballast").value(),
                         {})
        .value();
  }
  Cluster::Record Found(const std::string& name = "job") { return cluster_->FindJob(name).value(); }
  // As CreateJob does it.
  std::shared_ptr<Job> Create(Registration& registration, Engine& engine) {
    JobSpec spec = MakeJobSpec({});
    const Registration::Claim claim = registration.Take(spec).value();
    spec.epoch = claim.record.job.epoch();
    std::shared_ptr<Job> job = engine.CreateJob(spec).value();
    EXPECT_TRUE(registration.Keep(claim, *job).ok());
    return job;
  }

  cluster::FakeEtcd etcd_;
  std::unique_ptr<Cluster> cluster_ = OpenCluster();
  Engine engine_{{.memory_limit_bytes = int64_t{64} << 20, .threads = 1}};
  Registration registration_{engine_, OpenCluster(), kAddress};
};

TEST_F(RegistrationTest, RecordsAJobOnceItIsCreated) {
  registration_.Begin();
  ASSERT_EQ(cluster_->Services().value().size(), 1u);
  JobSpec spec = MakeJobSpec({});
  const Registration::Claim claim = registration_.Take(spec).value();
  EXPECT_EQ(Found().job.uid(), "");
  EXPECT_NE(Found().lease, 0);
  EXPECT_FALSE(registration_.Take(spec).value().is_own);  // A second call for the same job.
  spec.epoch = claim.record.job.epoch();
  const std::shared_ptr<Job> job = engine_.CreateJob(spec).value();
  EXPECT_EQ(job->Position().generation, Generation(1, spec.epoch));
  ASSERT_TRUE(registration_.Keep(claim, *job).ok());
  EXPECT_EQ(Found().job.uid(), job->uid());
  EXPECT_EQ(Found().job.lead(), kAddress);
  EXPECT_EQ(Found().lease, 0);
  registration_.Closed("job", job->uid());
  EXPECT_EQ(Found().revision, 0);
}

TEST_F(RegistrationTest, GivesTheNameBackOfAJobThatIsNotCreated) {
  registration_.Begin();
  const Registration::Claim claim = registration_.Take(MakeJobSpec({})).value();
  registration_.GiveBack(claim);
  EXPECT_TRUE(Eventually([&] { return Found().revision == 0; }));
}

TEST_F(RegistrationTest, RefusesANameThatIsAnothers) {
  registration_.Begin();
  Cluster::Record other;
  other.job.set_name("jobs/job");
  other.job.set_uid("u");
  other.job.set_lead("b:7070");
  ASSERT_TRUE(cluster_->PutJob(other).ok());
  EXPECT_TRUE(
      Refused(registration_.Take(MakeJobSpec({})).status(), absl::StatusCode::kFailedPrecondition));
  // Of this service, by an earlier process whose memory is gone.
  other = Found();
  other.job.set_lead(kAddress);
  ASSERT_TRUE(cluster_->PutJob(other).ok());
  EXPECT_TRUE(
      Refused(registration_.Take(MakeJobSpec({})).status(), absl::StatusCode::kFailedPrecondition));
}

TEST_F(RegistrationTest, TakesAFreeNameInAHigherEpoch) {
  registration_.Begin();
  Cluster::Record restored;
  restored.job.set_name("jobs/job");
  restored.job.set_epoch(1000);
  ASSERT_TRUE(cluster_->PutJob(restored).ok());
  EXPECT_EQ(registration_.Take(MakeJobSpec({})).value().record.job.epoch(), 1001u);
}

TEST_F(RegistrationTest, WritesAgainWhatEtcdHasLost) {
  registration_.Begin();
  const std::shared_ptr<Job> job = Create(registration_, engine_);
  ASSERT_TRUE(cluster_->DeleteJob(Found()).ok());
  etcd_.EndLease(1);
  EXPECT_TRUE(Eventually(
      [&] { return Found().job.uid() == job->uid() && cluster_->Services().value().size() == 1; }));
}

TEST_F(RegistrationTest, LearnsThatItsJobHasGoneOnElsewhere) {
  registration_.Begin();
  const std::shared_ptr<Job> job = Create(registration_, engine_);
  Cluster::Record record = Found();
  record.job.set_uid("another");
  record.job.set_lead("b:7070");
  record.job.set_epoch(record.job.epoch() + 1);
  ASSERT_TRUE(cluster_->PutJob(record).ok());
  EXPECT_TRUE(Eventually([&] { return job->is_superseded(); }));
  EXPECT_TRUE(Refused(job->Attach(AttachRequest{.rank = 0, .process_id = "p"}).status(),
                      absl::StatusCode::kFailedPrecondition, reason::kSuperseded));
  EXPECT_EQ(job->Status().phase, JobPhase::kBroken);
  EXPECT_GT(engine_.memory().used_bytes(), 0);
  EXPECT_TRUE(engine_.CloseJob("job").ok());
  EXPECT_TRUE(engine_.ListJobs().empty());
  EXPECT_EQ(Found().job.uid(), "another");
}

TEST_F(RegistrationTest, LeavesNoRecordOfWhatEndsWithIt) {
  registration_.Begin();
  const std::shared_ptr<Job> job = Create(registration_, engine_);
  registration_.End(/*keeps_jobs=*/false);
  EXPECT_EQ(Found().revision, 0);
}

}  // namespace
}  // namespace ballast::server
