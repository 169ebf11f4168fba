// Connections to a real service are cut repeatedly, at any byte: the job ends with the same state
// as an undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/connect.h"
#include "client/transport/grpc_transport.h"
#include "tests/client/cutting_proxy.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/session/rank_for_tests.h"
#include "tests/support/service_for_tests.h"

namespace ballast::client {
namespace {

constexpr int kWorldSize = 2;
constexpr uint32_t kMicroSteps = 2;
constexpr uint64_t kSteps = 6;

int PortOf(ServiceForTests& service) {
  const std::string& address = service.server().addresses().at(0);
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port)) << address;
  return port;
}

class CutConnection : public testing::TestWithParam<std::tuple<UpdateMode, Traffic>> {
 protected:
  UpdateMode update_mode() const { return std::get<UpdateMode>(GetParam()); }
  Traffic traffic() const { return std::get<Traffic>(GetParam()); }
  int port() { return PortOf(service_); }
  // Clipped at every other step, so that speculated updates are dropped there.
  static StepSettings SettingsOf(uint64_t step) {
    return {.scale = {.loss_scale = step % 2 == 0 ? 1.0 : 1e4}};
  }
  void TrainRank(std::shared_ptr<grpc::Channel> channel, const JobSpec& job, int rank) {
    SessionOptions options;
    options.seal_timeout = absl::Minutes(4);  // In case the other rank fails.
    auto self = RankForTests::Join(std::move(channel), job, rank, options, traffic());
    ASSERT_TRUE(self.ok()) << self.status();
    ReferenceRun reference(job);
    for (uint64_t step = 1; step <= kSteps; ++step) {
      const auto decision = (*self)->Step(kMicroSteps, SettingsOf(step));
      ASSERT_TRUE(decision.ok()) << decision.status();
      const Decision expected = reference.Step(step, kMicroSteps, SettingsOf(step).scale);
      EXPECT_EQ(decision->step, step);
      EXPECT_EQ(decision->norm, expected.norm);
      EXPECT_EQ((*self)->Difference(reference), "") << "at step " << step;
    }
  }
  std::string StateHash(const std::string& name) {
    return service_.engine().FindJob(name).value()->StateHash();
  }

  ServiceForTests service_{Way::kTcp,
                           {.seal_deadline_seconds = 0.05, .seal_reminder_seconds = 0.05}};
};

TEST_P(CutConnection, LeavesTheStateOfAnUndisturbedRun) {
  JobSpec job = SmallJob("undisturbed", kWorldSize);
  job.update_mode = update_mode();
  ForEachRank(kWorldSize, [&](int rank) { TrainRank(service_.NewChannel(), job, rank); });
  const std::string undisturbed = StateHash(job.name);
  // With shared memory, little more than the messages for reopening goes through the connection;
  // recovery from cuts in the middle of those is slow.
  const bool payloads = traffic() == Traffic::kPayloads;
  const size_t range = payloads ? 4000 : 1000;
  const size_t most_cuts = payloads ? 8 : 4;
  // Cut sessions mostly wait, so several jobs go side by side.
  constexpr uint32_t kSeeds = 10;
  std::atomic<int> cuts = 0;
  ForEachRank(kSeeds, [&](int seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    JobSpec cut_job = job;
    cut_job.name = absl::StrCat("cut-", seed);
    ForEachRank(kWorldSize, [&](int rank) {
      std::mt19937 random(static_cast<uint32_t>(seed * kWorldSize + rank));
      std::deque<CuttingProxy::Budget> budgets = {{.bytes = 12000 + random() % range}};
      while (budgets.size() < most_cuts) {
        budgets.push_back({.bytes = 1000 + random() % range, .up = random() % 2 == 0});
      }
      CuttingProxy proxy(port(), budgets);
      TrainRank(Connect(proxy.target()).value(), cut_job, rank);
      cuts += proxy.cuts();
    });
    EXPECT_EQ(StateHash(cut_job.name), undisturbed);
  });
  EXPECT_GE(cuts, payloads ? 40 : 30);
}

// At every stage of joining: creating the job, attaching, opening the stream, uploading, reading.
TEST_P(CutConnection, WhileJoiningIsNotNoticed) {
  JobSpec job = SmallJob("x", 1);
  job.update_mode = update_mode();
  std::atomic<int> cuts = 0;
  const auto join = [&](size_t bytes, bool up) {
    SCOPED_TRACE(absl::StrCat(bytes, up ? " bytes up" : " bytes down"));
    JobSpec cut_job = job;
    cut_job.name = absl::StrCat("join-", bytes, up ? "-up" : "-down");
    // The second cut comes while the session recovers from the first. Connect does not retry.
    CuttingProxy proxy(port(), {{.bytes = bytes, .up = up}, {.bytes = bytes, .up = up}});
    const auto channel = Connect(proxy.target());
    if (!channel.ok()) return;
    auto rank = RankForTests::Join(*channel, cut_job, 0, {}, traffic());
    ASSERT_TRUE(rank.ok()) << rank.status();
    EXPECT_EQ((*rank)->Difference(ReferenceRun(cut_job)), "");
    ASSERT_TRUE((*rank)->Step(1, {}).ok());
    cuts += proxy.cuts();
  };
  std::vector<size_t> budgets;
  for (size_t bytes = 100; bytes < 12000; bytes += bytes < 3000 ? 300 : 1500) {
    budgets.push_back(bytes);
  }
  constexpr int kSideBySide = 4;
  ForEachRank(kSideBySide, [&](int first) {
    for (size_t i = static_cast<size_t>(first) / 2; i < budgets.size(); i += kSideBySide / 2) {
      join(budgets[i], /*up=*/first % 2 == 0);
    }
  });
  EXPECT_GE(cuts, 20);
}

INSTANTIATE_TEST_SUITE_P(Modes, CutConnection,
                         testing::Combine(testing::Values(UpdateMode::kWait,
                                                          UpdateMode::kSpeculate),
                                          testing::Values(Traffic::kPayloads, Traffic::kInPlace)),
                         [](const auto& info) {
                           return std::string(std::get<UpdateMode>(info.param) == UpdateMode::kWait
                                                  ? "Wait"
                                                  : "Speculate") +
                                  Name(std::get<Traffic>(info.param));
                         });

// An outage of the service's port, and how a session with so much patience comes through it.
struct Outage {
  std::string name;
  std::deque<CuttingProxy::Budget> connections;  // That do not get through.
};

class OutageTest : public testing::TestWithParam<Outage> {
 protected:
  // The session's first connection ends in the middle of a step.
  static constexpr size_t kBeforeTheOutage = 12000;

  ServiceForTests service_{Way::kTcp};
};

// gRPC alone gives 20 seconds to each silent connection, and looks at a refused one every 5.
TEST_P(OutageTest, IsOverWithTheFirstConnectionThatGetsThrough) {
  std::deque<CuttingProxy::Budget> budgets = GetParam().connections;
  budgets.push_front({.bytes = kBeforeTheOutage});
  CuttingProxy proxy(PortOf(service_), budgets);
  SessionOptions options;
  options.reconnect_timeout = absl::Seconds(15);
  const JobSpec job = SmallJob("outage", 1);
  auto rank = RankForTests::Join(Connect(proxy.target()).value(), job, 0, options);
  ASSERT_TRUE(rank.ok()) << rank.status();
  ReferenceRun reference(job);
  for (uint64_t step = 1; step <= kSteps; ++step) {
    const auto decision = (*rank)->Step(kMicroSteps, {});
    ASSERT_TRUE(decision.ok()) << decision.status();
    reference.Step(step, kMicroSteps, {});
    EXPECT_EQ((*rank)->Difference(reference), "") << "at step " << step;
  }
  EXPECT_GE(proxy.accepted(), static_cast<int>(budgets.size()) + 1);
}

TEST_P(OutageTest, BeforeTheFirstConnectionIsWaitedFor) {
  CuttingProxy proxy(PortOf(service_), GetParam().connections);
  const auto channel = Connect(proxy.target(), absl::Seconds(15));
  EXPECT_TRUE(channel.ok()) << channel.status();
}

INSTANTIATE_TEST_SUITE_P(
    All, OutageTest,
    testing::Values(Outage{"Silent", {{.silent = true}, {.silent = true}}},
                    Outage{"Closing", std::deque<CuttingProxy::Budget>(6)},
                    Outage{"Both", {{}, {.silent = true}, {.bytes = 20}, {.silent = true}}}),
    [](const auto& info) { return info.param.name; });

// A service that accepts connections and sends nothing.
TEST(GrpcTransport, CancelsCallsThatAreUnderWay) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener, 4), 0);
  socklen_t size = sizeof(address);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const auto transport = MakeGrpcTransport(
      NewChannel(absl::StrCat("127.0.0.1:", ntohs(address.sin_port))).value(), absl::Minutes(10));
  absl::Status attached;
  absl::Status read;
  std::thread attacher(
      [&] { attached = transport->AttachWorker({}, absl::InfiniteDuration()).status(); });
  std::thread reader([&] {
    read =
        transport
            ->ReadWeights({}, absl::InfiniteDuration(),
                          [](const v1::WeightHeader&, PayloadPieces) { return absl::OkStatus(); })
            .status();
  });
  close(accept(listener, nullptr, nullptr));  // The calls have begun.
  transport->CancelCalls();
  attacher.join();
  reader.join();
  EXPECT_FALSE(attached.ok());
  EXPECT_FALSE(read.ok());
  // Every later call ends, too.
  EXPECT_EQ(transport->GetJob({}).status().code(), absl::StatusCode::kCancelled);
  close(listener);
}

}  // namespace
}  // namespace ballast::client
