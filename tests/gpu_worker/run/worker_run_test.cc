#include "gpu_worker/run/worker_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu_worker/temp_path.h"
#include "tests/gpu_worker/training/training.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

// What each of two ranks is told; `change` is made to rank 1's options.
std::vector<absl::Status> ToldWhere(const std::function<void(WorkerOptions&)>& change) {
  std::vector<absl::Status> statuses(2);
  RunRanks(2, [&](Collective& collective) {
    WorkerOptions options = OptionsOf({.world_size = 2});
    if (collective.rank() == 1) change(options);
    statuses[collective.rank()] =
        RunWorker(options, collective, MakeLocalOptimizer, [](const StepReport&) {});
  });
  return statuses;
}

TEST(WorkerRun, RanksThatDifferAreToldInWhat) {
  const std::vector<std::function<void(WorkerOptions&)>> changes = {
      [](WorkerOptions& options) { options.model.layers = 3; },
      [](WorkerOptions& options) { options.model.vocabulary = kGpt2Vocabulary; },
      [](WorkerOptions& options) { options.backend_name = "cuda"; },
      [](WorkerOptions& options) { options.collective_name = "gloo"; },
      [](WorkerOptions& options) { options.accumulation = Accumulation::kWorker; }};
  for (const auto& change : changes) {
    for (const absl::Status& status : ToldWhere(change)) {
      EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
    }
  }
}

TEST(WorkerRun, TokensThatTheModelDoesNotKnowAreRefused) {
  const TempPath temp("tokens.bin");
  std::vector<int32_t> header(256, 0);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = 1000;
  const std::vector<uint16_t> tokens(1000, 300);
  std::ofstream(temp.str(), std::ios::binary)
      .write(reinterpret_cast<const char*>(header.data()), header.size() * sizeof(header[0]))
      .write(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(tokens[0]));
  SingleCollective collective;
  WorkerOptions options = OptionsOf({.steps = 1});
  options.text = temp.str();
  const auto run = [&] {
    return RunWorker(options, collective, MakeLocalOptimizer, [](const StepReport&) {});
  };
  const absl::Status status = run();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kInvalidArgument));
  options.model.vocabulary = kGpt2Vocabulary;
  EXPECT_TRUE(run().ok());
}

TEST(WorkerRun, AModelThatNoHostHoldsIsRefusedBeforeItsLayoutIsMade) {
  SingleCollective collective;
  WorkerOptions options = OptionsOf({});
  options.model.layers = options.model.width = 1 << 14;
  const absl::Status status =
      RunWorker(options, collective, MakeLocalOptimizer, [](const StepReport&) {});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), testing::HasSubstr("--layers=16384"));  // And what the host has.
  options.trainer.batch = 1 << 28;
  EXPECT_TRUE(Refused(RunWorker(options, collective, MakeLocalOptimizer, [](const StepReport&) {}),
                      absl::StatusCode::kInvalidArgument));
}

// Notes announcements of weights on their way to the real one.
class WatchedBackend final : public TrainingBackend {
 public:
  WatchedBackend(std::unique_ptr<TrainingBackend> real, int chunks)
      : real_(std::move(real)), notices_(chunks, 0) {}

  void Start(GradientSink& sink) override { real_->Start(sink); }
  absl::Status UseGradientMemory(
      const std::function<absl::Span<std::byte>(int chunk)>& memory) override {
    return real_->UseGradientMemory(memory);
  }
  absl::Status MicroStep(const MicroStepInput& input) override { return real_->MicroStep(input); }
  absl::StatusOr<FinishedStep> FinishStep() override { return real_->FinishStep(); }
  absl::Span<std::byte> weights(int chunk) override { return real_->weights(chunk); }
  void OnWeights(int chunk) override {
    const std::lock_guard lock(mutex_);
    ++notices_[chunk];
  }
  absl::Status GatherWeights() override {
    {
      const std::lock_guard lock(mutex_);
      EXPECT_THAT(notices_, testing::Each(1)) << "before gather " << gathers_;
      notices_.assign(notices_.size(), 0);
    }
    ++gathers_;
    return real_->GatherWeights();
  }
  absl::Status ReadWeights(int group, absl::Span<std::byte> to) override {
    return real_->ReadWeights(group, to);
  }

 private:
  const std::unique_ptr<TrainingBackend> real_;
  int gathers_ = 0;
  std::mutex mutex_;
  std::vector<int> notices_;  // By chunk: how often its weights were announced.
};

TEST(WorkerRun, ABackendIsToldOfEveryChunksWeightsBeforeItGathersThem) {
  for (const client::SharedMemoryUse use :
       {client::SharedMemoryUse::kNever, client::SharedMemoryUse::kAuto}) {
    Service service(use);
    SingleCollective collective;
    WorkerOptions options = OptionsOf({.steps = 3});
    int made = 0;
    options.make_backend =
        [&](const WorkerOptions& completed, const TrainingJob& job,
            Collective& host) -> absl::StatusOr<std::unique_ptr<TrainingBackend>> {
      ++made;
      EXPECT_EQ(completed.trainer.context, completed.model.context);
      return std::make_unique<WatchedBackend>(MakeCpuBackend(completed, job, host).value(),
                                              job.layout.chunks().size());
    };
    const absl::Status status =
        RunWorker(options, collective, service.Optimizer(), [](const StepReport&) {});
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(made, 1);
  }
}

TEST(WorkerRun, ARankThatCannotBeginEndsTheOthersBeforeTheyWaitForIt) {
  const std::vector<absl::Status> statuses = ToldWhere([](WorkerOptions& options) {
    options.make_backend = [](const WorkerOptions&, const TrainingJob&,
                              Collective&) -> absl::StatusOr<std::unique_ptr<TrainingBackend>> {
      return absl::ResourceExhaustedError("the GPU is full");
    };
  });
  EXPECT_TRUE(Refused(statuses[0], absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(statuses[1], absl::StatusCode::kResourceExhausted));
}

TEST(WorkerRun, ABackendThatCannotBeMadeEndsItWithItsError) {
  SingleCollective collective;
  WorkerOptions options = OptionsOf({});
  options.make_backend = [](const WorkerOptions&, const TrainingJob&, Collective&) {
    return absl::ResourceExhaustedError("GPU 0 has too little memory");
  };
  EXPECT_EQ(RunWorker(options, collective, MakeLocalOptimizer, [](const StepReport&) {}),
            absl::ResourceExhaustedError("GPU 0 has too little memory"));
}

}  // namespace
}  // namespace ballast::worker
