#include "gpu_worker/run/worker_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/flags/reflection.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;

absl::StatusOr<WorkerFlags> Read(std::vector<std::string> words) {
  const absl::FlagSaver defaults;  // Given back when this returns.
  words.insert(words.begin(), "ballast-worker");
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  return ReadWorkerFlags(static_cast<int>(words.size()), arguments.data());
}

std::string Refusal(const std::vector<std::string>& words) {
  const absl::Status status = Read(words).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(WorkerFlags, AreTheCpuAndTheServiceByDefault) {
  const WorkerFlags flags = Read({}).value();
  EXPECT_EQ(flags.device, DeviceKind::kCpu);
  EXPECT_EQ(flags.options.backend_name, "cpu");
  EXPECT_EQ(flags.optimizer, OptimizerKind::kService);
  EXPECT_EQ(flags.options.model, GptConfig{});
  EXPECT_TRUE(flags.trace.empty());
}

TEST(WorkerFlags, MayBeWrittenWithDashesOrUnderscores) {
  EXPECT_EQ(Read({"--micro-steps=3"})->options.trainer.micro_steps, 3u);
  EXPECT_EQ(Read({"--micro_steps", "4"})->options.trainer.micro_steps, 4u);
}

TEST(WorkerFlags, TakeAModelByItsNameOrItsSizesAndNotBoth) {
  EXPECT_EQ(Read({"--model=gpt2-124M"})->options.model, FindGptConfig("gpt2-124M").value());
  EXPECT_EQ(Read({"--width=64", "--heads=2"})->options.model.width, 64);
  for (const std::string size : {"--layers=2", "--width=64", "--heads=2", "--context=64"}) {
    EXPECT_THAT(Refusal({"--model=gpt2-124M", size}),
                HasSubstr(size.substr(0, size.find('=')) + " is part of --model"));
  }
  EXPECT_THAT(Refusal({"--model=gpt5"}), HasSubstr("gpt2-124M"));
}

TEST(WorkerFlags, ChooseTheDeviceAndItsCollective) {
  const WorkerFlags flags = Read({"--device=cuda", "--collective=gloo"}).value();
  EXPECT_EQ(flags.device, DeviceKind::kCuda);
  EXPECT_EQ(flags.options.backend_name, "cuda");
  EXPECT_EQ(flags.collective, CollectiveKind::kGloo);
  EXPECT_THAT(Refusal({"--device=tpu"}), HasSubstr("--device=tpu must be cpu or cuda"));
  EXPECT_THAT(Refusal({"--collective=nccl"}), HasSubstr("use it with --device=cuda"));
}

TEST(WorkerFlags, KnowThatGpusComputeInBFloat16) {
  EXPECT_THAT(Refusal({"--device=cuda", "--dtype=fp32"}), HasSubstr("GPUs compute in bf16"));
  EXPECT_EQ(Read({"--device=cuda", "--wire-dtype=fp32"})->options.job.wire_dtype, DType::kFloat32);
}

TEST(WorkerFlags, WhoWaitsForTheServiceGivesUpBeforeWhoWaitsForTheWorker) {
  const WorkerFlags defaults = Read({}).value();
  EXPECT_EQ(defaults.options.seal_timeout, absl::Minutes(10));
  EXPECT_EQ(defaults.peer_timeout, absl::Minutes(15));
  const WorkerFlags patient = Read({"--seal-timeout=2h"}).value();
  EXPECT_EQ(patient.options.seal_timeout, absl::Hours(2));
  EXPECT_GT(patient.peer_timeout, patient.options.seal_timeout);
  // An explicit flag overrides it.
  EXPECT_EQ(Read({"--peer-timeout=60s"})->peer_timeout, absl::Minutes(1));
  EXPECT_THAT(Refusal({"--peer-timeout=0s"}),
              HasSubstr("--peer-timeout=0 must be between 1ms and"));
}

TEST(WorkerFlags, LeaveOutTheWeightsFileWhereNobodyReadsIt) {
  EXPECT_EQ(Read({"--out=run"})->options.weights_file, WeightsFile::kWritten);
  EXPECT_EQ(Read({"--out=run", "--nowrite-weights"})->options.weights_file,
            WeightsFile::kHashedOnly);
}

TEST(WorkerFlags, KeepPreviousIsTheJobs) {
  EXPECT_FALSE(Read({"--out=run"})->options.job.keep_previous);
  EXPECT_TRUE(Read({"--out=run", "--keep-previous"})->options.job.keep_previous);
}

TEST(WorkerFlags, AreRefusedWhereTheyMeanNothing) {
  EXPECT_THAT(Refusal({"--optimizer=local", "--update=wait"}), HasSubstr("--optimizer=service"));
  EXPECT_THAT(Refusal({"train"}), HasSubstr("unexpected argument 'train'"));
}

}  // namespace
}  // namespace ballast::worker
