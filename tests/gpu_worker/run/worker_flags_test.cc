#include "gpu_worker/run/worker_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

absl::StatusOr<WorkerFlags> Read(std::vector<std::string> words) {
  words.insert(words.begin(), "ballast-worker");
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  return ReadWorkerFlags(static_cast<int>(words.size()), arguments.data());
}

void ExpectRefused(const std::vector<std::string>& words) {
  EXPECT_TRUE(Refused(Read(words), absl::StatusCode::kInvalidArgument));
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
  EXPECT_FALSE(Read({"--keep_previous", "--nokeep_previous"})->options.job.keep_previous);
  ExpectRefused({"--micro-step=3"});
}

TEST(WorkerFlags, TakeAModelByItsNameOrItsSizesAndNotBoth) {
  EXPECT_EQ(Read({"--model=gpt2-124M"})->options.model, FindGptConfig("gpt2-124M").value());
  EXPECT_EQ(Read({"--width=64", "--heads=2"})->options.model.width, 64);
  for (const std::string size : {"--layers=2", "--width=64", "--heads=2", "--context=64"}) {
    ExpectRefused({"--model=gpt2-124M", size});
  }
  ExpectRefused({"--model=gpt5"});
}

TEST(WorkerFlags, ChooseTheDeviceAndItsCollective) {
  const WorkerFlags flags = Read({"--device=cuda", "--collective=gloo"}).value();
  EXPECT_EQ(flags.device, DeviceKind::kCuda);
  EXPECT_EQ(flags.options.backend_name, "cuda");
  EXPECT_EQ(flags.collective, CollectiveKind::kGloo);
  ExpectRefused({"--device=tpu"});
  ExpectRefused({"--collective=nccl"});
}

TEST(WorkerFlags, KnowThatGpusComputeInBFloat16) {
  ExpectRefused({"--device=cuda", "--dtype=fp32"});
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
  ExpectRefused({"--peer-timeout=0s"});
}

TEST(WorkerFlags, NameOneServiceOrSeveral) {
  EXPECT_EQ(Read({"--service=a:7070,b:7070"})->service, "a:7070,b:7070");
  EXPECT_EQ(Read({"--service=in-process"})->service, "in-process");
  // Ranks may reach a single service at other addresses, and name several alike.
  EXPECT_EQ(Read({"--service=a:7070"})->options.services,
            Read({"--service=unix:/run/a.sock"})->options.services);
  EXPECT_EQ(Read({"--service=a:7070, b:7070"})->options.services, "a:7070,b:7070");
  EXPECT_EQ(Read({"--service=node"})->options.services, "node");
  ExpectRefused({"--service=a:7070,"});
  ExpectRefused({"--service=a:7070,a:7070"});
}

TEST(WorkerFlags, KeepPreviousIsTheJobs) {
  EXPECT_FALSE(Read({"--out=run"})->options.job.keep_previous);
  EXPECT_TRUE(Read({"--out=run", "--keep-previous"})->options.job.keep_previous);
}

TEST(WorkerFlags, MuonIsOrthogonalizedWhereThePassesRunIfThatIsAGpu) {
  const auto of = [](std::vector<std::string> flags) {
    flags.push_back("--optimizer-rule=muon");
    return Read(flags)->options.job.newton_schulz;
  };
  EXPECT_EQ(of({}), Orthogonalizer::kService);
  EXPECT_EQ(of({"--device=cuda"}), Orthogonalizer::kWorkers);
  EXPECT_EQ(of({"--newton-schulz=workers"}), Orthogonalizer::kWorkers);
  EXPECT_EQ(of({"--device=cuda", "--newton-schulz=service"}), Orthogonalizer::kService);
  ExpectRefused({"--newton-schulz=workers"});
}

TEST(WorkerFlags, HaveAValueOfTheirChoices) {
  for (const auto& [flag, value] :
       {std::pair("--accumulate", "nowhere"), std::pair("--update", "never"),
        std::pair("--shared-memory", "always"), std::pair("--dtype", "fp8"),
        std::pair("--wire-dtype", "fp64"), std::pair("--seal-timeout", "-1s"),
        std::pair("--threads", "0"), std::pair("--state", "fp8")}) {
    ExpectRefused({flag, value});
  }
  // CLI11 would take these for a number.
  for (const std::string flag : {"--steps=-1", "--lr=nan", "--batch="}) {
    ExpectRefused({flag});
  }
  ExpectRefused({"--save=relative/path"});
}

TEST(WorkerFlags, AreRefusedWhereTheyMeanNothing) {
  ExpectRefused({"--min-loss-scale=2"});
  for (const std::string flag :
       {"--service=127.0.0.1:1", "--update=wait", "--seal-timeout=3s", "--shared-memory=never",
        "--reconnect-timeout=3s", "--resume=/there", "--save=/there", "--optimizer-rule=muon",
        "--state=8bit"}) {
    ExpectRefused({"--optimizer=local", flag});
  }
  ExpectRefused({"train"});
}

}  // namespace
}  // namespace ballast::worker
