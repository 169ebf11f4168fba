// Whole trainings against a real service in this process: the same bits as the local optimizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "gpu_worker/run/loss_log.h"
#include "tests/gpu_worker/collective/every_world.h"
#include "tests/gpu_worker/training/training.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

class ServiceTraining : public testing::TestWithParam<World> {};

INSTANTIATE_TEST_SUITE_P(Worlds, ServiceTraining, EveryWorld(), NameOfWorld);

TEST_P(ServiceTraining, EqualsTheLocalOptimizerBitForBit) {
  const auto [world_size, micro_steps, wire_dtype, accumulation] = GetParam();
  const Training training{.world_size = world_size,
                          .micro_steps = micro_steps,
                          .wire_dtype = wire_dtype,
                          .accumulation = accumulation};
  const Result local = Train(training, MakeLocalOptimizer);
  ASSERT_EQ(local.reports.size(), 6);
  for (const client::SharedMemoryUse use :
       {client::SharedMemoryUse::kNever, client::SharedMemoryUse::kAuto}) {
    Service service(use);
    ExpectSame(Train(training, service.Optimizer(),
                     [&](const StepReport& report) {
                       for (const RankProgress& rank : service.job()->Status().ranks) {
                         EXPECT_EQ(rank.shared_memory, use == client::SharedMemoryUse::kAuto);
                       }
                     }),
               local);
  }
  for (const StepReport& report : local.reports) EXPECT_LT(report.clip_coefficient, 1);
  EXPECT_LT(local.reports.back().loss, local.reports.front().loss);
}

TEST(ServiceTraining, TheNumberOfMicroStepsIsWhatEachStepSeals) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    const Training training{.world_size = 2,
                            .steps = 5,
                            .accumulation = accumulation,
                            .micro_steps_of_step = [](uint64_t step) { return 1 + step % 3; }};
    Service service;
    const Result with_service = Train(training, service.Optimizer());
    ExpectSame(with_service, Train(training, MakeLocalOptimizer));
    std::vector<uint32_t> sealed;
    for (const StepRecord& record : service.job()->Status().recent_steps) {
      sealed.push_back(record.micro_steps);
    }
    EXPECT_THAT(sealed, testing::ElementsAre(2, 3, 1, 2, 3));
  }
}

// Gradients are the same in the same world only, so the world of the resumed part is that of the
// whole; what is resumed is proved on another service.
TEST(ServiceTraining, ResumedFromACheckpointGivesTheBitsOfNeverHavingStopped) {
  for (const int world_size : {1, 2}) {
    Service whole, first, second;
    const TempPath checkpoint("checkpoint");
    const Result expected = Train({.world_size = world_size}, whole.Optimizer());
    Train({.world_size = world_size, .steps = 3, .save = checkpoint.str()}, first.Optimizer());
    const Result resumed = Train({.world_size = world_size}, second.Optimizer(checkpoint.str()));
    ASSERT_EQ(resumed.reports.size(), 3);
    EXPECT_EQ(resumed.reports[0].step, 4);
    EXPECT_EQ(resumed.reports[0].loss, expected.reports[3].loss);
    EXPECT_TRUE(resumed.weights == expected.weights) << world_size << " ranks";
  }
}

TEST(ServiceTraining, ToResumeMayStandInTheCommandFromTheFirstStartOn) {
  const TempPath checkpoint("checkpoint");
  const TempPath out("out");
  Service whole;
  const Result expected = Train({}, whole.Optimizer());
  // No checkpoint: a new job. A later service has none either, and then one.
  for (const uint64_t steps : {2, 4}) {
    Service service;
    const Result part =
        Train({.steps = steps, .save = checkpoint.str(), .out = out.str(), .resumes = true},
              service.Optimizer(checkpoint.str()));
    EXPECT_EQ(part.reports.size(), 2u);
    EXPECT_EQ(service.job()->Status().committed_step, steps);
  }
  Service last;
  const Result rest = Train({.out = out.str(), .resumes = true}, last.Optimizer(checkpoint.str()));
  EXPECT_TRUE(rest.weights == expected.weights);
  // All steps' lines, over all services.
  const std::vector<StepReport> lines = ParseLossesCsv(ReadAll(out.str() + "/losses.csv"));
  ASSERT_EQ(lines.size(), expected.reports.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i].step, i + 1);
    EXPECT_NEAR(lines[i].loss, expected.reports[i].loss, 1e-6);
  }
}

TEST(ServiceTraining, ACheckpointThatCannotBeLoadedLeavesNoEmptyJob) {
  Service first, second;
  const TempPath checkpoint("checkpoint");
  Train({.steps = 2, .save = checkpoint.str()}, first.Optimizer());
  std::ofstream(checkpoint.str() + "/step-2.1/master.safetensors") << "damaged";
  const Result failed = TrainUntilItEnds({.world_size = 2}, second.Optimizer(checkpoint.str()));
  EXPECT_EQ(failed.statuses[0].code(), absl::StatusCode::kDataLoss) << failed.statuses[0];
  EXPECT_FALSE(failed.statuses[1].ok());
  EXPECT_TRUE(second.engine().ListJobs().empty());
}

TEST(ServiceTraining, ACheckpointThatIsNamedIsTakenAndMustBeThere) {
  Service whole, first, second, third;
  const TempPath checkpoint("checkpoint");
  const Result expected = Train({}, whole.Optimizer());
  Train({.steps = 2, .save = checkpoint.str()}, first.Optimizer());
  Train({.steps = 4, .save = checkpoint.str()}, first.Optimizer());
  ASSERT_TRUE(std::filesystem::exists(checkpoint.str() + "/step-4.1"));
  const Result resumed = Train({}, second.Optimizer(checkpoint.str() + "/step-2"));
  ASSERT_FALSE(resumed.reports.empty());
  EXPECT_EQ(resumed.reports[0].step, 3);
  EXPECT_TRUE(resumed.weights == expected.weights);
  const Result failed = TrainUntilItEnds({}, third.Optimizer(checkpoint.str() + "/step-3"));
  EXPECT_TRUE(Refused(failed.statuses[0], absl::StatusCode::kNotFound)) << failed.statuses[0];
  EXPECT_TRUE(third.engine().ListJobs().empty());
}

TEST(ServiceTraining, ACheckpointResumesInAnotherWorld) {
  Service whole, first, second;
  const TempPath checkpoint("checkpoint");
  const Result expected = Train({.world_size = 2}, whole.Optimizer());
  Train({.world_size = 2, .steps = 3, .save = checkpoint.str()}, first.Optimizer());
  const Result resumed = Train({.world_size = 3}, second.Optimizer(checkpoint.str()));
  ASSERT_EQ(resumed.reports.size(), 3);
  // The same weights on the same batch, summed by three ranks instead of two.
  EXPECT_NEAR(resumed.reports[0].loss, expected.reports[3].loss, 1e-5);
}

TEST(ServiceTraining, AJobThatHasHadAllItsStepsLeavesItsOutputAgain) {
  Service service;
  const TempPath out("out");
  const Result first = Train({.world_size = 2, .steps = 2, .out = out.str()}, service.Optimizer());
  const std::string losses = ReadAll(out.str() + "/losses.csv");
  std::filesystem::remove(out.str() + "/weights.bin");
  std::filesystem::remove(out.str() + "/worker.json");
  const Result again = Train({.world_size = 2, .steps = 2, .out = out.str()}, service.Optimizer());
  EXPECT_TRUE(again.reports.empty());
  EXPECT_TRUE(again.weights == first.weights);
  EXPECT_EQ(ReadAll(out.str() + "/losses.csv"), losses);
  const nlohmann::json json = nlohmann::json::parse(ReadAll(out.str() + "/worker.json"));
  EXPECT_EQ(json["steps"], 2);
  EXPECT_EQ(json["coverage_complete_steps"], 2);
  EXPECT_GT(json["first_loss"], 5.0);
}

TEST(ServiceTraining, AJobThatIsPastItsLastStepSaysSo) {
  Service service;
  Train({.steps = 3}, service.Optimizer());
  const Result result = TrainUntilItEnds({.steps = 2}, service.Optimizer());
  EXPECT_TRUE(Refused(result.statuses[0], absl::StatusCode::kFailedPrecondition));
}

// A worker that is started again has the same flags.
TEST(ServiceTraining, ACheckpointIsLoadedIntoANewJobOnly) {
  Service whole, service;
  const TempPath checkpoint("checkpoint");
  const Result expected = Train({.steps = 3, .save = checkpoint.str()}, whole.Optimizer());
  const Result first = Train({.steps = 5}, service.Optimizer(checkpoint.str()));
  ASSERT_EQ(first.reports.size(), 2);
  const Result second = Train({.steps = 6}, service.Optimizer(checkpoint.str()));
  ASSERT_EQ(second.reports.size(), 1);
  EXPECT_EQ(second.reports[0].step, 6);
}

TEST(ServiceTraining, OutputSaysHowGradientsTravelled) {
  for (const auto& [use, words] : {std::pair(client::SharedMemoryUse::kNever, "the connection"),
                                   std::pair(client::SharedMemoryUse::kAuto, "shared memory")}) {
    Service service(use);
    const TempPath out("out");
    Train({.steps = 1, .out = out.str()}, service.Optimizer());
    EXPECT_EQ(nlohmann::json::parse(ReadAll(out.str() + "/worker.json"))["transport"], words);
  }
  const TempPath out("out");
  Train({.steps = 1, .out = out.str()}, MakeLocalOptimizer);
  EXPECT_FALSE(nlohmann::json::parse(ReadAll(out.str() + "/worker.json")).contains("transport"));
}

}  // namespace
}  // namespace ballast::worker
