// Whole trainings of a small GPT on devices: through a service, the bits of the optimizer on the
// device itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <tuple>
#include <utility>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/device/gloo_device_collective.h"
#include "gpu_worker/device/single_device_collective.h"
#include "gpu_worker/pipeline/device_arithmetic.h"
#include "gpu_worker/pipeline/device_backend.h"
#include "gpu_worker/training/local_optimizer.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/training/meddling_optimizer.h"
#include "tests/gpu_worker/training/training.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

// What a rank's backend borrows.
struct RankDevice {
  RankDevice(FakeDeviceOptions options, Collective& host)
      : device(std::move(options)),
        matmul(MakeFakeMatmul()),
        collective(host.world_size() == 1 ? MakeSingleDeviceCollective(device)
                                          : MakeGlooDeviceCollective(device, host)) {}
  FakeDevice device;
  const std::unique_ptr<DeviceMatmul> matmul;
  const std::unique_ptr<DeviceCollective> collective;
};

// Trains to wherever it gets. `service` null: the optimizer is on the device.
Result TrainOnDevices(const Training& training, FakeDeviceOptions device,
                      const MakeOptimizer& service) {
  const TempPath temporary("device_training");
  Result result;
  result.statuses.resize(training.world_size);
  RunRanks(training.world_size, [&](Collective& host) {
    FakeDeviceOptions own = device;
    own.seed += host.rank();
    RankDevice parts(own, host);
    WorkerOptions options = OptionsOf(training);
    // The kernels' attention has heads of 64.
    options.model = {.layers = 1, .heads = 1, .width = 64, .context = 8};
    options.trainer.batch = 3;
    options.job.bucket_elements = 16384;
    options.job.chunk_elements = 4096;
    options.out = temporary.str();
    options.make_backend = [&](const WorkerOptions& all, const TrainingJob& job, Collective&) {
      return MakeDeviceBackend({.model = all.model,
                                .sequences = all.trainer.batch,
                                .accumulation = all.accumulation,
                                .check_gradients = all.check_gradients,
                                .on_device = service == nullptr,
                                .staging_slots = 4,
                                .timeout = all.seal_timeout},
                               {parts.device, *parts.matmul, *parts.collective, job});
    };
    MakeOptimizer make = service;
    if (make == nullptr) {
      make = [&](const TrainingJob& job, TrainingBackend& backend,
                 Collective& collective) -> absl::StatusOr<std::unique_ptr<StepOptimizer>> {
        BALLAST_ASSIGN_OR_RETURN(
            std::unique_ptr<LocalArithmetic> arithmetic,
            MakeDeviceArithmetic(parts.device, job.layout, job.spec.groups, collective.rank(),
                                 /*sums=*/training.accumulation == Accumulation::kService &&
                                     training.micro_steps > 1,
                                 [&backend](int chunk) { return backend.weights(chunk); }));
        return std::make_unique<LocalOptimizer>(job.spec, job.layout, collective,
                                                std::move(arithmetic));
      };
    }
    result.statuses[host.rank()] = RunWorker(options, host, make, [&](const StepReport& report) {
      if (host.rank() == 0) result.reports.push_back(report);
    });
  });
  result.weights = ReadAll(temporary.str() + "/weights.bin");
  return result;
}

Result TrainWhole(const Training& training, uint64_t seed, const MakeOptimizer& service = nullptr) {
  Result result = TrainOnDevices(training, {.seed = seed}, service);
  for (const absl::Status& status : result.statuses) EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(result.weights.empty());
  EXPECT_EQ(result.reports.size(), training.steps);
  return result;
}

class DeviceTraining : public testing::TestWithParam<std::tuple<int, uint32_t, Accumulation>> {};

INSTANTIATE_TEST_SUITE_P(Worlds, DeviceTraining,
                         testing::Combine(testing::Values(1, 2), testing::Values(1, 3),
                                          testing::Values(Accumulation::kService,
                                                          Accumulation::kWorker)),
                         [](const auto& info) {
                           return "Ranks" + std::to_string(std::get<0>(info.param)) + "MicroSteps" +
                                  std::to_string(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) == Accumulation::kService ? "InService"
                                                                                     : "OnWorker");
                         });

TEST_P(DeviceTraining, ThroughTheServiceEqualsTheOptimizerOnTheDeviceBitForBit) {
  const auto [world_size, micro_steps, accumulation] = GetParam();
  Training training{.world_size = world_size,
                    .micro_steps = micro_steps,
                    .steps = 3,
                    .accumulation = accumulation};
  const Result local = TrainWhole(training, 1);
  EXPECT_LT(local.reports.back().loss, local.reports.front().loss);
  for (const StepReport& report : local.reports) EXPECT_LT(report.clip_coefficient, 1);
  uint64_t seed = 0;
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    for (const client::SharedMemoryUse use :
         {client::SharedMemoryUse::kNever, client::SharedMemoryUse::kAuto}) {
      training.update_mode = mode;
      Service service(use);
      ExpectSame(TrainWhole(training, ++seed, service.Optimizer()), local);
      EXPECT_EQ(service.job()->Status().coverage_complete_steps, 3);
    }
  }
}

// The next step's forward has begun by then, with weights of which some do not come.
TEST(DeviceTraining, AStepOfWhichARankMissesTheWeightsIsReadAgainWithTheSameBits) {
  const Training training{.world_size = 2, .steps = 4};
  const Result undisturbed = TrainWhole(training, 4);
  uint64_t seed = 5;
  for (const When when : {When::kBefore, When::kAfter}) {
    for (const int rank : {0, 1}) {
      for (const client::SharedMemoryUse use :
           {client::SharedMemoryUse::kNever, client::SharedMemoryUse::kAuto}) {
        Service service(use);
        const auto miss = [] { return absl::AbortedError("this rank's session has ended"); };
        const Result missed = TrainWhole(
            training, ++seed,
            Meddling(
                service.Optimizer(),
                OnceAt({.verb = Verb::kReceive, .when = when, .rank = rank, .step = 2}, miss)));
        ExpectSame(missed, undisturbed);
        EXPECT_EQ(service.job()->Status().committed_step, 4);
      }
    }
  }
}

// In bf16 and by the device's products; the service has fp32. So the curve is the same, and the bits
// are the device's own.
TEST(DeviceTraining, MuonsSecondRoundIsMadeOnTheDevices) {
  uint64_t seed = 20;
  for (const int world_size : {1, 2}) {
    Training training{.world_size = world_size, .steps = 3, .rule = Rule::kMuon};
    Service by_service;
    const Result reference = TrainWhole(training, ++seed, by_service.Optimizer());
    training.newton_schulz = Orthogonalizer::kWorkers;
    Service first;
    const Result made = TrainWhole(training, ++seed, first.Optimizer());
    for (size_t i = 0; i < made.reports.size(); ++i) {
      EXPECT_NEAR(made.reports[i].loss, reference.reports[i].loss, 1e-3) << "step " << i + 1;
    }
    EXPECT_LT(made.reports.back().loss, made.reports.front().loss);
    training.update_mode = UpdateMode::kWait;
    for (const Verb verb : {Verb::kReadDirections, Verb::kGiveOrthogonal, Verb::kReceive}) {
      Service service(client::SharedMemoryUse::kAuto);
      bool came = false;
      const auto lose = [&] {
        came = true;
        return service.EndSessions(world_size - 1);
      };
      ExpectSame(
          TrainWhole(training, ++seed,
                     Meddling(service.Optimizer(),
                              OnceAt({.verb = verb, .rank = world_size - 1, .step = 2}, lose))),
          made);
      EXPECT_TRUE(came);
    }
  }
}

TEST(DeviceTraining, ALostDeviceIsOneLineAndLeavesTheJobAtItsCommittedStep) {
  Service service;
  std::atomic<bool> lost = false;
  const auto fail = [&](absl::string_view, absl::string_view) {
    return lost ? absl::UnavailableError("GPU 0 (fake) is lost") : absl::OkStatus();
  };
  const auto lose = [&] {
    lost = true;
    return absl::OkStatus();
  };
  const Result result = TrainOnDevices(
      {.steps = 4}, {.seed = 1, .fail = fail},
      Meddling(service.Optimizer(), OnceAt({.verb = Verb::kPush, .step = 3, .index = 2}, lose)));
  EXPECT_EQ(result.statuses[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(result.statuses[0].message(), testing::HasSubstr("GPU 0 (fake) is lost"));
  EXPECT_THAT(result.statuses[0].message(), testing::Not(testing::HasSubstr("\n")));
  EXPECT_EQ(service.job()->Status().committed_step, 2);
}

}  // namespace
}  // namespace ballast::worker
