// Whole trainings against a real service in this process: the same bits as the local optimizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <mutex>
#include <tuple>

#include "cpu_optimizer_service/engine.h"
#include "gpu_worker/service_optimizer.h"
#include "gpu_worker/worker_run.h"
#include "server/server.h"
#include "tests/gpu_worker/ranks.h"
#include "tests/gpu_worker/temp_path.h"

namespace ballast::worker {
namespace {

constexpr int64_t kMemoryBytes = int64_t{1} << 30;

class Service {
 public:
  Service() : server_(server::Server::Start(engine_, {.listen = {}}).value()) {}

  MakeOptimizer Optimizer(const std::string& resume_directory = "") {
    return [this, resume_directory](const TrainingJob& job, WeightsAt weights,
                                    Collective& collective) {
      return OpenServiceOptimizer(
          server_->InProcessChannel(),
          {.job = job.spec, .weights = std::move(weights), .resume_directory = resume_directory},
          collective);
    };
  }

 private:
  Engine engine_{{.memory_limit_bytes = kMemoryBytes, .threads = 2}};
  std::unique_ptr<server::Server> server_;
};

struct Training {
  int world_size = 1;
  uint32_t micro_steps = 2;
  DType wire_dtype = DType::kBFloat16;
  uint64_t steps = 6;
  std::string save = {};
};

struct Result {
  std::vector<StepReport> reports;
  std::string weights;
};

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Result Train(const Training& training, const MakeOptimizer& optimizer) {
  const TempPath out("service_training");
  Result result;
  std::mutex mutex;
  RunRanks(training.world_size, [&](Collective& collective) {
    WorkerOptions options;
    options.model = {.layers = 2, .heads = 2, .width = 32, .context = 32};
    options.trainer.batch = 4;
    options.trainer.micro_steps = training.micro_steps;
    options.trainer.steps = training.steps;
    options.trainer.learning_rate = {.peak = 3e-3, .warmup_steps = 2, .decay_end = 6};
    // Several buckets and several chunks in each shard.
    options.job.bucket_elements = 8192;
    options.job.chunk_elements = 1024;
    options.job.wire_dtype = training.wire_dtype;
    options.job.max_norm = 0.5;  // Clips.
    options.out = out.str();
    options.save_directory = training.save;
    const absl::Status status =
        RunWorker(options, collective, optimizer, [&](const StepReport& report) {
          const std::lock_guard lock(mutex);
          if (collective.rank() == 0) result.reports.push_back(report);
        });
    EXPECT_TRUE(status.ok()) << "rank " << collective.rank() << ": " << status;
  });
  result.weights = ReadAll(out.str() + "/weights.bin");
  return result;
}

class ServiceTraining : public testing::TestWithParam<std::tuple<int, uint32_t, DType>> {};

INSTANTIATE_TEST_SUITE_P(Worlds, ServiceTraining,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(1, 3),
                                          testing::Values(DType::kBFloat16, DType::kFloat32)),
                         [](const auto& info) {
                           return "Ranks" + std::to_string(std::get<0>(info.param)) + "MicroSteps" +
                                  std::to_string(std::get<1>(info.param)) +
                                  std::string(Name(std::get<2>(info.param)));
                         });

TEST_P(ServiceTraining, EqualsTheLocalOptimizerBitForBit) {
  const auto [world_size, micro_steps, wire_dtype] = GetParam();
  const Training training{
      .world_size = world_size, .micro_steps = micro_steps, .wire_dtype = wire_dtype};
  Service service;
  const Result with_service = Train(training, service.Optimizer());
  const Result local = Train(training, MakeLocalOptimizer);
  ASSERT_FALSE(local.weights.empty());
  EXPECT_TRUE(with_service.weights == local.weights) << "the final weights differ";
  ASSERT_EQ(with_service.reports.size(), 6);
  for (size_t i = 0; i < local.reports.size(); ++i) {
    EXPECT_EQ(with_service.reports[i].loss, local.reports[i].loss);
    EXPECT_EQ(with_service.reports[i].norm, local.reports[i].norm);
    EXPECT_EQ(with_service.reports[i].clip_coefficient, local.reports[i].clip_coefficient);
    EXPECT_LT(local.reports[i].clip_coefficient, 1);
  }
  EXPECT_LT(local.reports.back().loss, local.reports.front().loss);
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

TEST(ServiceTraining, AJobThatIsAtItsLastStepSaysSo) {
  Service service;
  Train({.steps = 2}, service.Optimizer());
  SingleCollective collective;
  WorkerOptions options;
  options.model = {.layers = 2, .heads = 2, .width = 32, .context = 32};
  options.trainer.steps = 2;
  options.job.bucket_elements = 8192;
  options.job.chunk_elements = 1024;
  options.job.max_norm = 0.5;
  const absl::Status status =
      RunWorker(options, collective, service.Optimizer(), [](const StepReport&) {});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), testing::HasSubstr("job gpt is at step 2 already"));
}

}  // namespace
}  // namespace ballast::worker
