#include "client/session/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/session/session_impl.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/reason.h"
#include "proto/convert.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/session/fake_transport.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

class JoinTest : public testing::Test {
 protected:
  absl::StatusOr<v1::AttachWorkerResponse> JoinAs(int rank) {
    options_.rank = rank;
    absl::Time deadline = clock_.Now() + options_.join_timeout;
    return Join(fake_, clock_, options_, deadline);
  }

  FakeTransport fake_;
  FakeClock clock_;
  SessionOptions options_{.job = SmallJob("gpt", 2), .process_id = "p"};
};

TEST(TimeForMemory, GrowsWithTheJob) {
  JobSpec job = SmallJob("gpt", 2);
  EXPECT_EQ(TimeForMemory(job), absl::ZeroDuration());
  job.layout.parameters.push_back({.name = "large", .shape = {1 << 20, 1 << 10}});
  EXPECT_EQ(TimeForMemory(job), absl::Seconds(64));
  // Nonsense is refused elsewhere, and is not waited for until then.
  job.layout.parameters.push_back({.name = "absurd", .shape = {INT64_MAX, INT64_MAX}});
  EXPECT_EQ(TimeForMemory(job), absl::Hours(1));
  job.layout.parameters = {{.name = "negative", .shape = {-(1 << 30)}}};
  EXPECT_EQ(TimeForMemory(job), absl::ZeroDuration());
}

TEST(SessionOfALargeJob, IsWaitedForLonger) {
  auto transport = std::make_unique<FakeTransport>();
  transport->attach_results.assign(1000, absl::NotFoundError("no such job"));
  FakeClock clock;
  SessionOptions options{.job = SmallJob("gpt", 2), .rank = 1, .process_id = "p"};
  LayoutSpec& layout = options.job.layout;
  layout.parameters[0].shape = {1 << 16, 1 << 10};
  layout.chunk_elements = kMaxChunkElements;
  layout.partitions = PartitionsOf(MakeBuckets(FlatElements(layout), 2, 1 << 20), 2);
  const absl::Time start = clock.Now();
  const absl::Status status = SessionImpl::Open(std::move(transport), clock, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(clock.Now() - start, options.join_timeout + absl::Seconds(4));
}

TEST_F(JoinTest, RankZeroCreatesAndAttaches) {
  fake_.attachment.set_uid("u");
  const auto attached = JoinAs(0);
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->uid(), "u");
  EXPECT_EQ(fake_.creates, 1);
  EXPECT_EQ(fake_.last_attach.name(), "jobs/gpt");
  EXPECT_EQ(fake_.last_attach.process_id(), "p");
  EXPECT_EQ(proto::FromProto(fake_.last_attach.job()).value(), options_.job);
}

TEST_F(JoinTest, RankZeroAttachesToAJobThatIsThere) {
  fake_.create_results = {absl::AlreadyExistsError("there")};
  EXPECT_TRUE(JoinAs(0).ok());
  EXPECT_EQ(fake_.attaches, 1);
}

TEST_F(JoinTest, OtherErrorsEndItAtOnce) {
  fake_.create_results = {absl::ResourceExhaustedError("does not fit")};
  EXPECT_TRUE(Refused(JoinAs(0), absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(fake_.attaches, 0);
  fake_.attach_results = {absl::FailedPreconditionError("world size 2, not 3")};
  EXPECT_TRUE(Refused(JoinAs(1), absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(clock_.sleeps.empty());
}

TEST_F(JoinTest, ACertainJobIsNeitherCreatedNorAwaited) {
  options_.job_uid = "u";
  options_.rejoin = true;
  for (int rank : {0, 1}) {
    fake_.attach_results = {absl::NotFoundError("no such job")};
    EXPECT_EQ(JoinAs(rank).status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(fake_.last_attach.uid(), "u");
  }
  EXPECT_TRUE(JoinAs(0).ok());
  EXPECT_EQ(fake_.creates, 0);
  EXPECT_TRUE(clock_.sleeps.empty());
}

// Rank 0 derives it, and the others wait for that, by the uid of the job before.
TEST_F(JoinTest, AJobIsDerivedByRankZeroAndAwaitedByTheOthers) {
  options_.derive_from_uid = "before";
  options_.derive_from_checkpoint = "gpt/step-7";
  EXPECT_TRUE(JoinAs(0).ok());
  EXPECT_EQ(fake_.last_create.derive_from().uid(), "before");
  EXPECT_EQ(fake_.last_create.derive_from().checkpoint(), "gpt/step-7");
  EXPECT_EQ(fake_.last_attach.derived_from(), "before");
  fake_.attach_results.assign(3, absl::NotFoundError("none is derived"));
  EXPECT_TRUE(JoinAs(1).ok());
  EXPECT_EQ(fake_.creates, 1);
  EXPECT_EQ(fake_.last_attach.derived_from(), "before");
  EXPECT_EQ(clock_.sleeps.size(), 3u);
  fake_.attach_results = {
      WithReason(absl::FailedPreconditionError("an earlier try"), reason::kOtherDescription)};
  EXPECT_TRUE(JoinAs(1).ok());
  EXPECT_EQ(clock_.sleeps.size(), 4u);
  // When it is opened again it is the job that was joined.
  options_.job_uid = "u";
  EXPECT_TRUE(JoinAs(0).ok());
  EXPECT_EQ(fake_.creates, 1);
  EXPECT_EQ(fake_.last_attach.derived_from(), "");
}

TEST_F(JoinTest, OtherRanksWaitForTheJobWithBoundedBackoff) {
  fake_.attach_results.assign(8, absl::NotFoundError("no such job"));
  EXPECT_TRUE(JoinAs(1).ok());
  EXPECT_EQ(fake_.creates, 0);
  EXPECT_EQ(fake_.attaches, 9);
  ASSERT_EQ(clock_.sleeps.size(), 8u);
  EXPECT_EQ(clock_.sleeps.front(), absl::Milliseconds(20));
  EXPECT_EQ(clock_.sleeps.back(), absl::Seconds(1));
}

TEST_F(JoinTest, GivesUpAtTheTimeoutAndSaysWhy) {
  fake_.attach_results.assign(1000, absl::NotFoundError("no such job"));
  const absl::Time start = clock_.Now();
  const absl::Status status = JoinAs(1).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(clock_.Now() - start, options_.join_timeout);
}

// A job whose memory is being made, and has last got further so long ago.
v1::Job Creating(double seconds_since_progress) {
  v1::Job job;
  job.set_phase(v1::CREATING);
  v1::Activity& activity = *job.add_activities();
  activity.set_kind(v1::MAKING_MEMORY);
  activity.set_total_bytes(int64_t{6} << 30);
  activity.set_seconds_since_progress(seconds_since_progress);
  return job;
}

TEST_F(JoinTest, ACreationIsWaitedForAsLongAsItGetsFurther) {
  const auto looks = static_cast<size_t>(3 * options_.join_timeout / absl::Seconds(1));
  v1::Job ready;
  ready.set_phase(v1::AWAITING_WEIGHTS);
  for (const int rank : {0, 1}) {
    fake_.jobs.assign(looks, Creating(0.5));
    fake_.jobs.push_back(ready);
    if (rank == 0) {  // The call ran out of time; the job exists when it is made again.
      fake_.create_results = {absl::DeadlineExceededError("no answer"),
                              absl::AlreadyExistsError("there")};
    } else {
      fake_.attach_results = {
          WithReason(absl::UnavailableError("being created"), reason::kJobBeingCreated)};
    }
    clock_.sleeps.clear();
    EXPECT_TRUE(JoinAs(rank).ok()) << rank;
    EXPECT_EQ(clock_.sleeps.size(), looks) << rank;
  }
}

TEST_F(JoinTest, ACreationThatGetsNoFurtherIsGivenUpAfterTheTimeout) {
  fake_.create_results = {absl::DeadlineExceededError("no answer")};
  for (int second = 0; second < 1000; ++second) fake_.jobs.push_back(Creating(second));
  const absl::Time start = clock_.Now();
  const absl::Status status = JoinAs(0).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(clock_.Now() - start, options_.join_timeout);
}

TEST_F(JoinTest, FirstWeightsAreAwaitedWhileTheyArrive) {
  v1::Job waiting;
  waiting.set_phase(v1::AWAITING_WEIGHTS);
  v1::Activity& activity = *waiting.add_activities();
  activity.set_kind(v1::TAKING_FIRST_WEIGHTS);
  const auto looks = static_cast<size_t>(3 * options_.join_timeout / absl::Seconds(1));
  for (size_t look = 0; look < looks; ++look) {
    activity.set_done_bytes(static_cast<int64_t>(look / 20));
    fake_.jobs.push_back(waiting);
  }
  waiting.set_phase(v1::READY);
  fake_.jobs.push_back(waiting);
  EXPECT_TRUE(
      AwaitFirstWeights([this] { return GetJob(fake_, "gpt", ""); }, clock_, options_).ok());
}

TEST_F(JoinTest, FirstWeightsAreAwaitedUntilTheJobIsReady) {
  v1::Job waiting;
  waiting.set_phase(v1::AWAITING_WEIGHTS);
  v1::Job ready;
  ready.set_phase(v1::READY);
  fake_.jobs = {waiting, waiting, ready};
  EXPECT_TRUE(
      AwaitFirstWeights([this] { return GetJob(fake_, "gpt", ""); }, clock_, options_).ok());
  EXPECT_EQ(clock_.sleeps.size(), 2u);
}

TEST_F(JoinTest, FirstWeightsThatDoNotComeNameTheRanksThatAreAbsent) {
  v1::Job waiting;
  waiting.set_phase(v1::AWAITING_WEIGHTS);
  waiting.add_ranks()->set_attached(true);
  waiting.add_ranks()->set_rank(1);
  fake_.jobs = {waiting};
  const absl::Status status =
      AwaitFirstWeights([this] { return GetJob(fake_, "gpt", ""); }, clock_, options_).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
}

TEST(DefaultProcessId, StaysTheSame) {
  EXPECT_EQ(DefaultProcessId(), DefaultProcessId());
  EXPECT_FALSE(DefaultProcessId().empty());
}

}  // namespace
}  // namespace ballast::client
