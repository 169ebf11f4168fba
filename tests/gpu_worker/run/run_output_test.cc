#include "gpu_worker/run/run_output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "gpu_worker/collective/single_collective.h"
#include "gpu_worker/gpt/architecture.h"
#include "gpu_worker/run/progress.h"
#include "gpu_worker/run/worker_run.h"
#include "tests/gpu_worker/temp_path.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

StepReport SomeReport() {
  StepReport report;
  report.step = 12;
  report.loss = 3.25;
  report.norm = 1.5;
  report.clip_coefficient = 0.5;
  report.applied = true;
  report.seconds = 0.25;
  report.tokens_per_second = 4096;
  report.times = {.compute = 0.2, .reduce = 0.02, .send = 0.01, .update = 0.015, .receive = 0.005};
  return report;
}

WorkerOptions TinyRun(const std::string& out) {
  WorkerOptions options;
  options.model = {.layers = 1, .heads = 2, .width = 16, .context = 16};
  options.trainer.batch = 2;
  options.trainer.steps = 3;
  options.optimizer_name = "local";
  options.out = out;
  return options;
}

TEST(Progress, LineHasTheStepAndItsSplit) {
  EXPECT_EQ(FormatProgress(SomeReport(), 80),
            "step 12/80  loss 3.2500  norm 1.500  4096 tokens/s  250 ms: compute 200 reduce 20 "
            "send 10 update 15 receive 5");
  StepReport skipped = SomeReport();
  skipped.applied = false;
  skipped.skip_reason = "gradient of wte is not finite";
  EXPECT_THAT(FormatProgress(skipped, 80), HasSubstr("skipped: gradient of wte is not finite"));
}

TEST(Progress, SummaryHasTheExposedSeconds) {
  const StepReport report = SomeReport();
  EXPECT_DOUBLE_EQ(report.times.exposed(), 0.05);  // All but the passes.
  EXPECT_EQ(FormatSummary({.steps = 80, .seconds = 30.2, .exposed = 1.51}),
            "80 steps in 30.2 s, 1.51 s of them exposed (5.0%)");
}

TEST(RunOutput, ExposedSecondsAreThoseOfAllStepsThatWereTimed) {
  StepReport recovered = SomeReport();
  recovered.seconds = std::numeric_limits<double>::quiet_NaN();
  recovered.times.reduce = recovered.seconds;
  const TrainingJob job =
      MakeTrainingJob(GptParameters({.layers = 1, .heads = 2, .width = 16, .context = 16}), {})
          .value();
  const nlohmann::json json =
      nlohmann::json::parse(WorkerJson({.reports = {SomeReport(), recovered, SomeReport()}}, job));
  EXPECT_DOUBLE_EQ(json["exposed_seconds"], 0.1);
}

TEST(RunOutput, ARunLeavesItsThreeFiles) {
  const TempPath temp("run_output");
  const std::string& out = temp.str();
  SingleCollective collective;
  ASSERT_TRUE(
      RunWorker(TinyRun(out), collective, MakeLocalOptimizer, [](const StepReport&) {}).ok());

  const std::string weights = ReadAll(out + "/weights.bin");
  const nlohmann::json json = nlohmann::json::parse(ReadAll(out + "/worker.json"));
  EXPECT_EQ(json["parameters"].get<size_t>() * 2, weights.size());
  EXPECT_EQ(json["steps"], 3);
  EXPECT_EQ(json["weights_dtype"], "bf16");
  EXPECT_FALSE(json.contains("speculated_chunks"));  // Only the service counts.
  EXPECT_EQ(json["groups"], 2);
  EXPECT_EQ(json["workers"], 1);
  EXPECT_EQ(json["micro_steps"], 2);
  EXPECT_GT(json["first_loss"], 5.0);
  EXPECT_GT(json["tokens_per_second"], 0.0);
  EXPECT_GT(json["exposed_seconds"], 0.0);
  EXPECT_THAT(ReadAll(out + "/losses.csv"), StartsWith("step,loss"));
  // Nothing else, nothing partial.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(out), {}), 3);
}

TEST(RunOutput, AFullDiskLeavesNothingHalfWritten) {
  const TempPath out("full_disk");
  const WorkerOptions options = TinyRun("");
  SingleCollective collective;
  const TrainingJob job = MakeTrainingJob(GptParameters(options.model), {}).value();
  const auto backend = MakeCpuBackend(options, job, collective).value();
  ASSERT_TRUE(PrepareOutput(out.str()).ok());
  // A limit on file sizes stands for the full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = WorkerJson({}, job).size() - 1;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = WriteOutput(out.str(), {}, job, *backend);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
  EXPECT_TRUE(std::filesystem::is_empty(out.str()));
}

TEST(RunOutput, LookingWhetherItCanWriteLeavesTheUsersFilesAlone) {
  const TempPath temp("users_probe");
  std::filesystem::create_directories(temp.str());
  std::ofstream(temp.str() + "/.probe") << "mine";
  ASSERT_TRUE(PrepareOutput(temp.str()).ok());
  EXPECT_EQ(ReadAll(temp.str() + "/.probe"), "mine");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(temp.str()), {}), 1);
}

TEST(RunOutput, AnOutputThatCannotBeWrittenIsSaidBeforeTraining) {
  SingleCollective collective;
  int steps = 0;
  const absl::Status status = RunWorker(TinyRun("/proc/nowhere"), collective, MakeLocalOptimizer,
                                        [&](const StepReport&) { ++steps; });
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
  EXPECT_EQ(steps, 0);
}

}  // namespace
}  // namespace ballast::worker
