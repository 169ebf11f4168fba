#include "gpu_worker/collective/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "tests/gpu_worker/held_port.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

absl::StatusOr<Launch> Read(const std::map<std::string, std::string>& environment) {
  return ReadLaunch([&](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  });
}

TEST(Launch, IsAWorldOfOneWhenNothingIsSet) {
  const Launch launch = Read({}).value();
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.world_size, 1);
}

TEST(Launch, TakesTheVariablesOfTorchrun) {
  const Launch launch =
      Read({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node-0"}, {"MASTER_PORT", "1234"}})
          .value();
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.master_host, "node-0");
  EXPECT_EQ(launch.master_port, 1234);
}

TEST(Launch, TakesTheLocalRankFromTheRankWhereItIsNotSet) {
  EXPECT_EQ(Read({{"RANK", "3"}, {"WORLD_SIZE", "4"}})->local_rank, 3);
  EXPECT_EQ(Read({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}})->local_rank, 1);
}

TEST(Launch, NamesTheVariableThatIsWrong) {
  EXPECT_TRUE(Refused(Read({{"RANK", "one"}}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Read({{"WORLD_SIZE", "0"}}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Refused(Read({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Read({{"LOCAL_RANK", "-1"}}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(Read({{"MASTER_PORT", "70000"}}), absl::StatusCode::kInvalidArgument));
}

TEST(Launch, ConnectsTheWorkersOfOneMasterPort) {
  const HeldPort held;
  const auto sum_of_ranks = [&](int rank) {
    const auto collective =
        ConnectWorkers({.rank = rank, .world_size = 3, .master_port = held.port()},
                       std::chrono::seconds(30))
            .value()
            .collective;
    double sum = collective->rank();
    EXPECT_TRUE(collective->AllReduceSum({&sum, 1}).ok());
    return sum;
  };
  std::thread other([&] { EXPECT_EQ(sum_of_ranks(1), 3); });
  std::thread another([&] { EXPECT_EQ(sum_of_ranks(2), 3); });
  EXPECT_EQ(sum_of_ranks(0), 3);
  other.join();
  another.join();
}

TEST(Launch, NamesTheWorkerThatDoesNotArrive) {
  const HeldPort held;
  const absl::Status status =
      ConnectWorkers({.world_size = 2, .master_port = held.port()}, std::chrono::milliseconds(300))
          .status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
}

}  // namespace
}  // namespace ballast::worker
