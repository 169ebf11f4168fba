#include "cpu_optimizer_service/common/plan/homes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/messages.h"

namespace ballast {
namespace {

JobSpec OfRanks(int ranks) {
  JobSpec job;
  job.layout.world_size = ranks;
  return job;
}

std::vector<std::string> Services(int count) {
  std::vector<std::string> services;
  for (int i = 0; i < count; ++i) services.push_back(std::to_string(i));
  return services;
}

TEST(Services, AreAddressesWithCommasBetween) {
  EXPECT_EQ(ParseServices("a:7070").value(), std::vector<std::string>{"a:7070"});
  EXPECT_EQ(ParseServices(" a:7070 ,\tunix:/run/b.sock\n").value(),
            (std::vector<std::string>{"a:7070", "unix:/run/b.sock"}));
  for (const char* wrong : {"", "a:7070,", "a:7070, ,b:7070", "a:7070,b:7070, a:7070"}) {
    EXPECT_TRUE(Refused(ParseServices(wrong), absl::StatusCode::kInvalidArgument));
  }
}

TEST(SpreadRanks, ASingleServiceIsNotNamed) {
  JobSpec job = OfRanks(4);
  EXPECT_TRUE(SpreadRanks({"a:7070"}, job).ok());
  EXPECT_EQ(job, OfRanks(4));
}

TEST(SpreadRanks, RanksGoToServicesInOrder) {
  JobSpec job = OfRanks(7);
  EXPECT_TRUE(SpreadRanks({"a:7070", "b:7070", "c:7070"}, job).ok());
  EXPECT_EQ(job.members, (std::vector<MemberSpec>{{"a:7070"}, {"b:7070"}, {"c:7070"}}));
  EXPECT_EQ(job.homes, (std::vector<int>{0, 0, 0, 1, 1, 2, 2}));
}

TEST(SpreadRanks, SharesAreConsecutiveAndDifferByOneAtMost) {
  for (int ranks = 2; ranks <= 40; ++ranks) {
    for (int services = 2; services <= ranks; ++services) {
      JobSpec job = OfRanks(ranks);
      ASSERT_TRUE(SpreadRanks(Services(services), job).ok());
      ASSERT_EQ(job.homes.size(), ranks);
      EXPECT_TRUE(std::is_sorted(job.homes.begin(), job.homes.end()));
      for (int service = 0; service < services; ++service) {
        const auto share = std::count(job.homes.begin(), job.homes.end(), service);
        EXPECT_GE(share, ranks / services);
        EXPECT_LE(share, ranks / services + 1);
      }
    }
  }
}

TEST(SpreadRanks, EachServiceNeedsARank) {
  JobSpec job = OfRanks(3);
  EXPECT_TRUE(SpreadRanks(Services(3), job).ok());
  for (const int ranks : {1, 3}) {
    job = OfRanks(ranks);
    EXPECT_TRUE(Refused(SpreadRanks(Services(4), job), absl::StatusCode::kInvalidArgument));
    EXPECT_EQ(job, OfRanks(ranks));
  }
}

TEST(SpreadOverNodes, ARanksHomeIsTheServiceOfItsNode) {
  const NodeService a{"gpu1", "id-a", "a:7070"};
  const NodeService b{"gpu2", "id-b", "[fd00::2]:7070"};
  JobSpec job = OfRanks(5);
  EXPECT_TRUE(SpreadOverNodes({b, a, b, a, a}, job).ok());
  EXPECT_EQ(job.members, (std::vector<MemberSpec>{{b.address}, {a.address}}));
  EXPECT_EQ(job.homes, (std::vector<int>{0, 1, 0, 1, 1}));
}

TEST(SpreadOverNodes, ASingleNodesServiceIsNotNamedWhereverItListens) {
  for (const char* address : {"a:7070", "", "127.0.0.1:7070"}) {
    JobSpec job = OfRanks(2);
    EXPECT_TRUE(SpreadOverNodes({{"gpu1", "id", address}, {"gpu1", "id", address}}, job).ok());
    EXPECT_EQ(job, OfRanks(2));
  }
}

TEST(SpreadOverNodes, EachServiceHasAnAddressForOtherNodes) {
  const NodeService right{"gpu1", "id-a", "a:7070"};
  for (const char* wrong : {"", "127.0.0.1:7070", "localhost:7070", "[::1]:7070", "a:7070"}) {
    const NodeService other{"gpu2", "id-b", wrong};
    JobSpec job = OfRanks(2);
    EXPECT_TRUE(
        Refused(SpreadOverNodes({right, other}, job), absl::StatusCode::kFailedPrecondition));
    EXPECT_TRUE(
        Refused(SpreadOverNodes({other, right}, job), absl::StatusCode::kFailedPrecondition));
    EXPECT_EQ(job, OfRanks(2));
  }
}

}  // namespace
}  // namespace ballast
