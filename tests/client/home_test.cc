#include "client/home.h"

#include <grpcpp/client_context.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/client/job_for_tests.h"
#include "tests/support/messages.h"
#include "tests/support/service_for_tests.h"

namespace ballast::client {
namespace {

class Home : public testing::Test {
 protected:
  static std::string AddressOf(ServiceForTests& service) { return service.server().addresses()[0]; }
  std::string both() { return absl::StrCat(AddressOf(first_), ", ", AddressOf(second_)); }

  // The service that a rank of this job is connected to.
  Engine* Reached(const std::string& services, int rank, JobSpec& job) {
    const auto channel = ConnectHome(services, rank, job);
    EXPECT_TRUE(channel.ok()) << channel.status();
    if (!channel.ok()) return nullptr;
    grpc::ClientContext context;
    v1::ListJobsResponse jobs;
    const grpc::Status listed = v1::JobService::NewStub(*channel)->ListJobs(&context, {}, &jobs);
    EXPECT_TRUE(listed.ok()) << listed.error_message();
    for (ServiceForTests* service : {&first_, &second_}) {
      if (service->engine().instance_id() == jobs.instance_id()) return &service->engine();
    }
    return nullptr;
  }

  ServiceForTests first_;
  ServiceForTests second_;
};

TEST_F(Home, OfEachRankIsItsServiceOfTheList) {
  for (int rank = 0; rank < 3; ++rank) {
    JobSpec job = SmallJob("spread", 3);
    EXPECT_EQ(Reached(both(), rank, job), rank < 2 ? &first_.engine() : &second_.engine());
    EXPECT_EQ(job.members, (std::vector<MemberSpec>{{AddressOf(first_)}, {AddressOf(second_)}}));
    EXPECT_EQ(job.homes, (std::vector<int>{0, 0, 1}));
  }
}

TEST_F(Home, OfAllRanksIsASingleServiceWhichTheJobDoesNotName) {
  JobSpec job = SmallJob("alone", 3);
  EXPECT_EQ(Reached(AddressOf(second_), 2, job), &second_.engine());
  EXPECT_EQ(job, SmallJob("alone", 3));
}

TEST_F(Home, IsWhatTheJobSaysIfItHasMembers) {
  JobSpec job = SmallJob("given", 3);
  job.members = {{AddressOf(second_)}, {AddressOf(first_)}};
  job.homes = {1, 0, 1};
  const JobSpec given = job;
  EXPECT_EQ(Reached("", 0, job), &first_.engine());
  EXPECT_EQ(Reached("", 1, job), &second_.engine());
  EXPECT_EQ(job, given);
}

TEST_F(Home, OfAJobWithMembersMayBeReachedElsewhere) {
  JobSpec job = SmallJob("elsewhere", 2);
  job.members = {{"gpu1:7070"}, {"gpu2:7070"}};
  job.homes = {0, 1};
  const JobSpec given = job;
  EXPECT_EQ(Reached(AddressOf(first_), 0, job), &first_.engine());
  EXPECT_EQ(Reached(AddressOf(second_), 1, job), &second_.engine());
  EXPECT_EQ(job, given);
}

TEST_F(Home, IsRefusedWhereThereCanBeNone) {
  const auto expect_refused = [](const std::string& services, int rank, JobSpec job) {
    EXPECT_TRUE(Refused(ConnectHome(services, rank, job), absl::StatusCode::kInvalidArgument));
  };
  const JobSpec job = SmallJob("refused", 2);
  expect_refused("gpu1", 0, job);
  // Rank 0, too, whose home is well named.
  expect_refused(absl::StrCat(AddressOf(first_), ",gpu2"), 0, job);
  expect_refused("a:1,b:1,", 0, job);
  expect_refused("a:1,b:1,a:1", 0, job);
  expect_refused("a:1,b:1,c:1", 0, job);
  expect_refused("a:1,b:1", 2, job);
  expect_refused("a:1,b:1", -1, job);
  JobSpec given = job;
  given.members = {{"a:1"}, {"b:1"}};
  given.homes = {0, 0};
  expect_refused("", 0, given);
  given.homes = {0, 1};
  expect_refused("gpu1", 0, given);
}

}  // namespace
}  // namespace ballast::client
