// Trainings whose workers make Muon's second round on their CPUs, by the service's kernels: the bits
// of a service that makes it, whatever happens in the round.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/gpu_worker/training/meddling_optimizer.h"
#include "tests/gpu_worker/training/training.h"

namespace ballast::worker {
namespace {

Training MuonTraining(int world_size, Orthogonalizer newton_schulz) {
  return {
      .world_size = world_size, .steps = 4, .rule = Rule::kMuon, .newton_schulz = newton_schulz};
}

const Result& ByTheService(int world_size) {
  static const auto train = [](int ranks) {
    Service service;
    return Train(MuonTraining(ranks, Orthogonalizer::kService), service.Optimizer());
  };
  static const Result of_one = train(1), of_two = train(2), of_three = train(3);
  return world_size == 1 ? of_one : world_size == 2 ? of_two : of_three;
}

TEST(MuonTraining, WorkersGiveTheBitsOfTheService) {
  for (const int world_size : {1, 2, 3}) {
    for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
      for (const client::SharedMemoryUse use :
           {client::SharedMemoryUse::kNever, client::SharedMemoryUse::kAuto}) {
        Service service(use);
        Training training = MuonTraining(world_size, Orthogonalizer::kWorkers);
        training.update_mode = mode;
        ExpectSame(Train(training, service.Optimizer()), ByTheService(world_size));
        EXPECT_EQ(service.job()->spec().newton_schulz, Orthogonalizer::kWorkers);
        // Directions and O, too.
        const JobTraffic traffic = service.job()->Status().traffic;
        const bool shares = use == client::SharedMemoryUse::kAuto;
        EXPECT_EQ(traffic.gradient_bytes_in_messages > 0, !shares);
        EXPECT_EQ(traffic.weight_bytes_in_messages > 0, !shares);
        EXPECT_EQ(traffic.gradient_bytes_in_place > 0, shares);
        EXPECT_EQ(traffic.weight_bytes_in_place > 0, shares);
      }
    }
  }
}

class SecondRoundTraining : public testing::TestWithParam<Instant> {
 protected:
  static Instant At() { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(
    Instants, SecondRoundTraining,
    testing::Values(Instant{.verb = Verb::kReadDirections, .rank = 1, .step = 2},
                    Instant{.verb = Verb::kReadDirections, .when = When::kAfter, .step = 2},
                    Instant{.verb = Verb::kGiveOrthogonal, .step = 3},
                    Instant{.verb = Verb::kGiveOrthogonal, .rank = 1, .step = 3},
                    Instant{.verb = Verb::kGiveOrthogonal, .when = When::kAfter, .step = 3},
                    Instant{.verb = Verb::kReceive, .rank = 1, .step = 2}),
    [](const auto& info) { return "Instant" + std::to_string(info.index); });

TEST_P(SecondRoundTraining, ARankThatComesAgainMakesTheRoundAgain) {
  Service service;
  bool came = false;
  const auto lose = [&] {
    came = true;
    return service.EndSessions(At().rank);
  };
  const Result result = Train(MuonTraining(2, Orthogonalizer::kWorkers),
                              Meddling(service.Optimizer(), OnceAt(At(), lose)));
  ExpectSame(result, ByTheService(2));
  EXPECT_TRUE(came);
  EXPECT_EQ(service.job()->Status().coverage_complete_steps, 4u);
}

TEST_P(SecondRoundTraining, WhatAnOperatorAbortsTheServiceMakes) {
  Service service;
  bool came = false;
  const auto abort = [&] {
    came = true;
    const absl::Status status = service.job()->AbortStep().status();
    // Earlier the first round may go on, and later the second may be over.
    const bool is_awaited = At().when == When::kBefore ? At().verb == Verb::kGiveOrthogonal
                                                       : At().verb == Verb::kReadDirections;
    EXPECT_TRUE(status.ok() || (!is_awaited && absl::IsFailedPrecondition(status))) << status;
    return absl::OkStatus();
  };
  const Result result = Train(MuonTraining(2, Orthogonalizer::kWorkers),
                              Meddling(service.Optimizer(), OnceAt(At(), abort)));
  ExpectSame(result, ByTheService(2));
  EXPECT_TRUE(came);
}

// The ranks that come next end it before their first step.
TEST_P(SecondRoundTraining, WorkersThatEndInTheRoundAreReplaced) {
  Service service;
  const Training training = MuonTraining(2, Orthogonalizer::kWorkers);
  const auto fail = [] { return absl::InternalError("this worker ends"); };
  const Result failed = TrainUntilItEnds(
      training, Meddling(service.Optimizer("", absl::Seconds(2)), OnceAt(At(), fail)));
  EXPECT_EQ(failed.statuses[At().rank].code(), absl::StatusCode::kInternal);
  const Result result = Train(training, service.Optimizer());
  EXPECT_TRUE(result.weights == ByTheService(2).weights) << "the final weights differ";
  ASSERT_EQ(result.reports.size(), 4 - At().step);
  EXPECT_EQ(result.reports[0].loss, ByTheService(2).reports[At().step].loss);
}

}  // namespace
}  // namespace ballast::worker
