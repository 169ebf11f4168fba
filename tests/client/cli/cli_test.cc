// The `ballast` binary with the `ballastd` binary, as a user runs them.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "ballast/v1/state.grpc.pb.h"
#include "client/connect.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/session/rank_for_tests.h"
#include "tests/support/eventually.h"
#include "tests/support/messages.h"
#include "tests/support/processes.h"

namespace ballast::client {
namespace {

using json = nlohmann::ordered_json;  // As printed.
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

const std::string kBin = BALLAST_BIN_DIR;

class CliTest : public testing::Test {
 protected:
  CliTest() : directory_(testing::TempDir() + "cli_test." + std::to_string(getpid())) {
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  ~CliTest() override { std::filesystem::remove_all(directory_); }

  void SetUp() override {
    daemon_ = std::make_unique<Ballastd>(
        kBin + "/ballastd",
        std::vector<std::string>{"--listen=127.0.0.1:0", "--memory-limit=512MiB", "--allow-paths"});
    ASSERT_NE(daemon_->Address(), "") << daemon_->Errors();
    auto channel = Connect(daemon_->Address());
    ASSERT_TRUE(channel.ok()) << channel.status();
    auto rank = RankForTests::Join(*channel, SmallJob("gpt", 1), 0);
    ASSERT_TRUE(rank.ok()) << rank.status();
    rank_ = *std::move(rank);
    ASSERT_TRUE(rank_->Step(2, {}).ok());
  }

  ProcessResult Ballast(std::vector<std::string> words) {
    words.push_back("--service=" + daemon_->Address());
    return BallastAlone(std::move(words));
  }
  // A command that asks no service.
  ProcessResult BallastAlone(std::vector<std::string> words) {
    words.insert(words.begin(), kBin + "/ballast");
    return RunProcess(words, directory_);
  }
  std::string Text(std::vector<std::string> words) {
    const ProcessResult result = Ballast(std::move(words));
    EXPECT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(result.error, "");
    return result.output;
  }
  json Json(std::vector<std::string> words) {
    words.push_back("--json");
    const std::string text = Text(std::move(words));
    EXPECT_TRUE(json::accept(text)) << text;
    return json::accept(text) ? json::parse(text) : json();
  }
  // With one line that says why.
  static void ExpectFailed(const ProcessResult& result, int exit_code) {
    EXPECT_EQ(result.exit_code, exit_code);
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(std::count(result.error.begin(), result.error.end(), '\n'), 1) << result.error;
    EXPECT_TRUE(Says(absl::StripSuffix(result.error, "\n")));
  }
  void ExpectFailure(std::vector<std::string> words, int exit_code = 1) {
    ExpectFailed(Ballast(std::move(words)), exit_code);
  }

  const std::string directory_;
  std::unique_ptr<Ballastd> daemon_;
  std::unique_ptr<RankForTests> rank_;
};

TEST_F(CliTest, JobsAndJobShowTheRun) {
  EXPECT_THAT(Text({"jobs"}), AllOf(HasSubstr("gpt"), HasSubstr("ready"), HasSubstr("MiB")));
  EXPECT_EQ(Json({"jobs"})["jobs"][0]["name"], "jobs/gpt");
  EXPECT_THAT(Text({"job", "gpt"}), AllOf(HasSubstr("1 committed"), HasSubstr("applied")));
  const json job = Json({"job", "gpt"});
  EXPECT_EQ(job["committed_step"], 1);
  EXPECT_EQ(job["uid"], rank_->session().job_uid());
  EXPECT_EQ(job["world_size"], 1);
  EXPECT_GT(job["memory"]["total_bytes"], 0);
  EXPECT_EQ(job["ranks"][0]["attached"], true);
  EXPECT_EQ(job["ranks"][0]["chunks"], 5);
  EXPECT_EQ(job["recent_steps"][0]["micro_steps"], 2);
  EXPECT_GT(job["recent_steps"][0]["norm"], 0);
}

TEST_F(CliTest, GroupsShowAndSetGroupChanges) {
  EXPECT_THAT(Text({"groups", "gpt"}), AllOf(HasSubstr("no_decay"), HasSubstr("0.02")));
  const json groups = Json({"groups", "gpt"});
  EXPECT_EQ(groups["groups"][0]["name"], "jobs/gpt/groups/decay");
  EXPECT_EQ(groups["groups"][0]["trainable_elements"], 940);
  EXPECT_EQ(groups["groups"][1]["wire_dtype"], "FP32");
  const json changed = Json({"set-group", "gpt", "no_decay", "--lr", "0.125", "--beta1=0.5"});
  EXPECT_EQ(changed["hyper_parameters"]["lr"], 0.125);
  EXPECT_EQ(changed["hyper_parameters"]["beta1"], 0.5);
  EXPECT_EQ(changed["hyper_parameters"]["beta2"], 0.999);
  // The next step uses it.
  ReferenceRun reference(SmallJob("gpt", 1));
  reference.Step(1, 2, {});
  reference.hyper_parameters(1).lr = 0.125;
  reference.hyper_parameters(1).beta1 = 0.5;
  reference.Step(2, 1, {});
  ASSERT_TRUE(rank_->Step(1, {}).ok());
  EXPECT_EQ(rank_->Difference(reference), "");
  EXPECT_THAT(Text({"set-group", "gpt", "decay", "--bias-correction", "false"}),
              HasSubstr(" no bias_correction "));
  ExpectFailure({"set-group", "gpt", "decay", "--momentum", "0.9"});
}

TEST_F(CliTest, GroupsHistoryShowsWhatEachStepUsed) {
  ASSERT_TRUE(rank_->Step(1, {}).ok());
  Text({"set-group", "gpt", "no_decay", "--beta1", "0.5", "--maximize=true"});
  ASSERT_TRUE(rank_->Step(1, {}).ok());
  StepSettings settings;
  settings.overrides[0].lr = 0.0625;
  ASSERT_TRUE(rank_->Step(1, settings).ok());
  const std::string text = Text({"groups", "gpt", "--history"});
  EXPECT_THAT(text, HasSubstr("group decay\n"));
  EXPECT_THAT(text, HasSubstr("\nsteps 1-3  AdamW        0.01  beta1=0.9 beta2=0.999 "));
  EXPECT_THAT(text, HasSubstr("\nstep 4     AdamW      0.0625  beta1=0.9 beta2=0.999 "));
  EXPECT_THAT(
      text,
      HasSubstr("\nsteps 1-2  AdamW      0.02  beta1=0.9 beta2=0.999 eps=1e-08 weight_decay=0\n"));
  EXPECT_THAT(text, HasSubstr(" beta1=0.5 beta2=0.999 eps=1e-08 weight_decay=0 maximize\n"));
  const json steps = Json({"groups", "gpt", "--history"})["recent_steps"];
  ASSERT_EQ(steps.size(), 4u);
  EXPECT_EQ(steps[2]["hyper_parameters"][1]["beta1"], 0.5);
}

TEST_F(CliTest, JobShowsTheStepInProgress) {
  ASSERT_TRUE(rank_->session().BeginStep({}).ok());
  for (const int chunk : rank_->chunks()) ASSERT_TRUE(rank_->Push(chunk, 0).ok());
  ASSERT_TRUE(rank_->session().EndMicroStep(0, {}).ok());
  ASSERT_TRUE(rank_->Push(rank_->chunks()[0], 1).ok());
  // The service has everything when it has the last chunk.
  json rank;
  while (rank["furthest_micro_step"] != 2) rank = Json({"job", "gpt"})["ranks"][0];
  EXPECT_EQ(rank["micro_steps_ended"], 1);
  EXPECT_EQ(rank["chunks_complete"], 1);
  EXPECT_EQ(rank["missing_parameters"], json({"wte", "h.0.w", "h.0.b"}));
  EXPECT_THAT(Text({"job", "gpt"}), AllOf(HasSubstr("open; step 2 waits for rank 0\n"),
                                          HasSubstr("rank 0 is behind with: wte, h.0.w, h.0.b\n")));
}

TEST_F(CliTest, StateShowsPlanesAndWritesThemForNumPy) {
  EXPECT_THAT(Text({"state", "gpt", "wte"}),
              AllOf(HasSubstr("[40, 16] (640 elements)"), HasSubstr("exp_avg_sq: norm"),
                    HasSubstr("####")));
  const json summary = Json({"state", "gpt", "wte"});
  EXPECT_EQ(summary["planes"].size(), 3u);
  EXPECT_EQ(summary["update_count"], 1);
  EXPECT_EQ(Json({"state", "gpt", "wte", "--plane=exp_avg"})["planes"].size(), 1u);

  const std::string file = directory_ + "/w.npy";
  const json written = Json({"state", "gpt", "h.0.b", "--out", file});
  EXPECT_EQ(written["plane"], "MASTER");
  EXPECT_EQ(written["shape"], json({7}));
  const std::string contents = ReadFile(file);
  ASSERT_EQ(contents.size(), 128u + 28u);
  // Group no_decay returns fp32, so its weights are its master weights.
  EXPECT_EQ(contents.substr(128), rank_->memory().at(4).substr(0, 28));
  EXPECT_THAT(Text({"state", "gpt", "wte", "--plane", "exp_avg", "--out", file}),
              HasSubstr("wrote exp_avg of wte"));
}

TEST_F(CliTest, WriteStateWritesAPlaneBetweenSteps) {
  const std::string file = directory_ + "/m.npy";
  Text({"state", "gpt", "wte", "--plane=exp_avg", "--out", file});
  std::string contents = ReadFile(file);
  const float value = -0.125f;
  std::memcpy(contents.data() + 128 + 4 * 17, &value, sizeof(value));
  std::ofstream(file, std::ios::binary) << contents;
  const json written = Json({"write-state", "gpt", "wte", file, "--plane=exp_avg"});
  EXPECT_EQ(written["step"], 1);
  const std::string again = directory_ + "/again.npy";
  Text({"state", "gpt", "wte", "--plane=exp_avg", "--out", again});
  EXPECT_EQ(ReadFile(again), contents);
  ASSERT_TRUE(rank_->Step(1, {}).ok());  // The run goes on.
  EXPECT_THAT(Text({"write-state", "gpt", "wte", file, "--plane=exp_avg"}),
              HasSubstr("exp_avg of wte is "));
  // What cannot be written leaves what is there.
  const auto now = [&] {
    Text({"state", "gpt", "wte", "--plane=exp_avg_sq", "--out", again});
    return ReadFile(again);
  };
  const std::string before = now();
  ExpectFailure({"write-state", "gpt", "wte", file, "--plane=exp_avg_sq"});
  ExpectFailure({"write-state", "gpt", "h.0.b", file, "--plane=exp_avg"});
  ExpectFailure({"write-state", "gpt", "wtee", file, "--plane=exp_avg"});
  ExpectFailure({"write-state", "gpt", "wte", file, "--plane=max_exp_avg_sq"});
  ExpectFailure({"write-state", "gpt", "wte", directory_ + "/none.npy", "--plane=exp_avg"});
  std::ofstream(file, std::ios::binary) << contents.substr(0, contents.size() - 3);
  ExpectFailure({"write-state", "gpt", "wte", file, "--plane=exp_avg_sq"});
  std::ofstream(file, std::ios::binary) << "not an array";
  ExpectFailure({"write-state", "gpt", "wte", file, "--plane=exp_avg_sq"});
  EXPECT_EQ(now(), before);
}

TEST_F(CliTest, SaveLoadAndClose) {
  const std::string checkpoint = directory_ + "/checkpoint";
  const json saved = Json({"save", "gpt", checkpoint});
  EXPECT_EQ(saved["step"], 1);
  EXPECT_GT(saved["bytes"], 0);
  EXPECT_EQ(saved["directory"], checkpoint + "/step-1.1");
  ASSERT_TRUE(rank_->Step(1, {}).ok());
  EXPECT_EQ(Json({"save", "gpt", checkpoint})["step"], 2);
  const json all = Json({"checkpoints", checkpoint})["checkpoints"];
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0]["name"], checkpoint + "/step-2.1");
  EXPECT_EQ(all[1]["size_bytes"], saved["bytes"]);
  EXPECT_EQ(all[1]["uid"], rank_->session().job_uid());
  EXPECT_EQ(all[1]["asked_for"], true);
  EXPECT_EQ(all[1]["problem"], "");
  EXPECT_THAT(Text({"verify", checkpoint}), HasSubstr("step-2.1"));
  EXPECT_THAT(Text({"checkpoints", checkpoint}), HasSubstr("\n2 checkpoints, "));
  std::filesystem::resize_file(checkpoint + "/step-2.1/master.safetensors", 20);
  EXPECT_THAT(Text({"checkpoints", checkpoint}), HasSubstr("yes"));
  ExpectFailure({"verify", checkpoint});
  EXPECT_THAT(Text({"verify", checkpoint + "/step-1.1"}), HasSubstr("yes"));
  ExpectFailure({"checkpoints"});
  ExpectFailure({"delete-checkpoint", checkpoint + "/step-7"});
  ExpectFailure({"delete-checkpoint", checkpoint + "/step-1", "--uid=another"});
  ExpectFailure({"delete-checkpoint", "gpt"}, 2);
  EXPECT_EQ(Json({"save", "gpt", checkpoint})["directory"], checkpoint + "/step-2.1.2");
  const json deleted = Json({"delete-checkpoint", checkpoint + "/step-2.1.2"})["checkpoints"];
  ASSERT_EQ(deleted.size(), 1u);
  EXPECT_EQ(deleted[0]["size_bytes"], saved["bytes"]);
  EXPECT_EQ(Json({"save", "gpt", checkpoint})["directory"], checkpoint + "/step-2.1.2");
  EXPECT_THAT(Text({"delete-checkpoint", checkpoint + "/step-2.1.2"}),
              HasSubstr("deleted " + checkpoint + "/step-2.1.2, "));
  const json loaded = Json({"load", "gpt", checkpoint});
  EXPECT_EQ(loaded["directory"], checkpoint + "/step-1.1");
  EXPECT_EQ(loaded["passed_over"].size(), 1u);
  EXPECT_EQ(loaded["step"], 1);
  EXPECT_GT(loaded["generation"]["count"], rank_->session().generation().count);
  // The session belongs to the older generation.
  EXPECT_FALSE(rank_->Step(1, {}).ok());
  // A file cannot contain a directory.
  ExpectFailure({"save", "gpt", checkpoint + "/latest/below"});
  EXPECT_EQ(Json({"close", "gpt"}), json::object());
  EXPECT_EQ(Json({"jobs"})["jobs"].size(), 0u);
}

TEST_F(CliTest, CloseOfAJobInTrainingIsRefusedInOneLine) {
  ExpectFailure({"close", "gpt"});
  EXPECT_EQ(Json({"job", "gpt"})["committed_step"], 1);
  ExpectFailure({"close", "gtp"});
  rank_.reset();  // It leaves.
  ASSERT_TRUE(Eventually([&] { return Json({"job", "gpt"})["ranks"][0]["attached"] == false; }));
  EXPECT_EQ(Json({"close", "gpt"}), json::object());
}

TEST_F(CliTest, AbortStepClearsTheOpenStep) {
  ExpectFailure({"abort-step", "gpt"});
  ASSERT_TRUE(rank_->session().BeginStep({}).ok());
  ASSERT_TRUE(rank_->Push(rank_->chunks()[0], 0).ok());
  // The step is open once the service has seen the stream's messages.
  while (Json({"job", "gpt"})["phase"] != "OPEN") std::this_thread::yield();
  EXPECT_EQ(Json({"abort-step", "gpt"})["aborted_step"], 2);
  EXPECT_EQ(Json({"job", "gpt"})["phase"], "READY");
}

TEST_F(CliTest, AbortStepInMuonsSecondRoundLeavesItToTheService) {
  auto channel = Connect(daemon_->Address());
  ASSERT_TRUE(channel.ok()) << channel.status();
  JobSpec spec = SmallJob("muon", 1);
  spec.groups[0].hyper_parameters = DefaultsOf(Rule::kMuon);
  spec.layout.parameters[1].shape = {30, 10};
  spec.newton_schulz = Orthogonalizer::kWorkers;
  auto rank = RankForTests::Join(*channel, spec, 0);
  ASSERT_TRUE(rank.ok()) << rank.status();
  Session& session = (*rank)->session();
  ASSERT_TRUE(session.BeginStep({}).ok());
  ASSERT_TRUE((*rank)->PushAll(1, [](int, uint32_t) { return true; }).ok());
  ASSERT_TRUE(session.Seal(1, SmallVote())->applied);
  while (Json({"job", "muon"})["phase"] != "DIRECTIONS") std::this_thread::yield();
  EXPECT_THAT(Text({"abort-step", "muon"}), AllOf(HasSubstr("step 1"), HasSubstr("the service")));
  EXPECT_TRUE(session.ReadDirections([](int, absl::Span<const std::byte>) {})->empty());
  EXPECT_TRUE(session.ReceiveWeights().ok());
  EXPECT_EQ(session.committed_step(), 1u);
}

TEST_F(CliTest, UndoGoesBackAStepOfAJobThatKeepsIt) {
  ExpectFailure({"undo", "gpt"});
  ExpectFailure({"undo", "gtp"});
  EXPECT_THAT(Text({"job", "gpt"}), testing::Not(HasSubstr("undo")));
  auto channel = Connect(daemon_->Address());
  ASSERT_TRUE(channel.ok()) << channel.status();
  JobSpec spec = SmallJob("kept", 1);
  spec.keep_previous = true;
  auto rank = RankForTests::Join(*channel, spec, 0);
  ASSERT_TRUE(rank.ok()) << rank.status();
  EXPECT_THAT(Text({"job", "kept"}), HasSubstr("undo          nothing to undo\n"));
  ASSERT_TRUE((*rank)->Step(1, {}).ok());
  const json before = Json({"state", "kept", "wte"})["planes"];
  ASSERT_TRUE((*rank)->Step(1, {}).ok());
  EXPECT_NE(Json({"state", "kept", "wte"})["planes"], before);
  const json job = Json({"job", "kept"});
  EXPECT_EQ(job["keep_previous"], true);
  EXPECT_EQ(job["undoable_step"], 2);
  EXPECT_GT(job["memory"]["previous_bytes"], job["memory"]["state_bytes"]);
  EXPECT_THAT(Text({"job", "kept"}),
              AllOf(HasSubstr("step 2 can be undone"), HasSubstr("previous versions ")));

  EXPECT_EQ(Json({"undo", "kept"})["undone_step"], 2);
  EXPECT_EQ(Json({"state", "kept", "wte"})["planes"], before);
  EXPECT_EQ(Json({"job", "kept"})["committed_step"], 1);
  EXPECT_FALSE((*rank)->Step(1, {}).ok()) << "its session is of the older generation";
  ExpectFailure({"undo", "kept"});
  rank = RankForTests::Join(*channel, spec, 0);
  ASSERT_TRUE(rank.ok()) << rank.status();
  ASSERT_TRUE((*rank)->Step(1, {}).ok());
  EXPECT_THAT(Text({"undo", "kept"}),
              HasSubstr("step 2 of job kept undone; the job is at step 1; the workers' streams"));
}

TEST_F(CliTest, PlanSaysWhereAFileIsNoJob) {
  const std::string file = directory_ + "/job.json";
  const auto plan = [&](const std::string& text) {
    std::ofstream(file) << text;
    ExpectFailed(BallastAlone({"plan", file, "--memory=1GiB"}), 2);
  };
  plan("{\n\"name\": \"jobs/a\",\n!\n}");
  plan(R"({"parameters": [{"name": "w", "shpae": [3]}]})");
  plan(R"({"parameters": [{"name": "w", "shape": ["x"]}]})");
}

TEST_F(CliTest, PlanRefusesGroupsAndSizesThatNoJobMayHave) {
  const std::string file = directory_ + "/job.json";
  const auto plan = [&](const std::string& parameter, const std::string& world_size = "1") {
    std::ofstream(file) << R"({"parameters": [{"name": "w", "trainable": true, )" << parameter
                        << "}]}";
    ExpectFailed(BallastAlone({"plan", file, "--memory=1GiB", "--world-size=" + world_size}), 2);
  };
  // So far behind the one group that nothing is there.
  plan(R"("shape": [3], "group": 1073741824)");
  plan(R"("shape": [3], "group": -1)");
  plan(R"("shape": [-5])");
  // In buckets it would take more memory than there is.
  plan(R"("shape": [4611686018427387904])");
  // As large as a job may be, but every bucket of it is cut for every rank.
  plan(R"("shape": [274877906944])", "65536");
}

TEST_F(CliTest, PlanSaysWhatThePreviousVersionTakes) {
  const json plan =
      json::parse(BallastAlone({"plan", "1M:fp32", "--memory=1GiB", "--json"}).output);
  EXPECT_EQ(plan["keep_previous"], false);
  EXPECT_GE(plan["keep_previous_bytes"], plan["options"][0]["state_bytes"]);
  EXPECT_EQ(plan["options"][0]["previous_bytes"], 0);
  EXPECT_THAT(BallastAlone({"plan", "1M:fp32", "--memory=1GiB"}).output,
              HasSubstr("To keep the previous version, for undo, takes "));
}

TEST_F(CliTest, CommandsThatAskNoServiceHaveNoFlagsOfOne) {
  for (const std::string command : {"plan", "export", "completion"}) {
    const std::string help = BallastAlone({"help", command}).output;
    EXPECT_THAT(help, AllOf(HasSubstr("--json"), HasSubstr("--help")));
    for (const char* flag : {"--service", "--tls-ca", "--token-file", "--wait", "--timeout"}) {
      EXPECT_THAT(help, Not(HasSubstr(flag))) << command;
    }
  }
  EXPECT_EQ(BallastAlone({"plan", "1M", "--service=127.0.0.1:1"}).exit_code, 2);
}

TEST_F(CliTest, APlanThatDoesNotFitIsPrintedAndExitsWithOne) {
  const ProcessResult plan = BallastAlone({"plan", "7B", "--memory=8GiB"});
  EXPECT_EQ(plan.exit_code, 1);
  EXPECT_EQ(plan.error, "");
  EXPECT_THAT(plan.output, HasSubstr("It does not fit"));
  EXPECT_EQ(BallastAlone({"plan", "7B", "--memory=8GiB", "--json"}).exit_code, 1);
  EXPECT_EQ(BallastAlone({"plan", "1M", "--memory=8GiB"}).exit_code, 0);
  EXPECT_EQ(BallastAlone({"plan", "1M", "--memory=128"}).exit_code, 2);  // Of what?
}

TEST_F(CliTest, TheServiceMayBeSaidByTheEnvironment) {
  const auto ask = [&](const std::string& variable, std::vector<std::string> flags) {
    flags.insert(flags.begin(),
                 {"/usr/bin/env", "BALLAST_SERVICE=" + variable, kBin + "/ballast", "jobs"});
    return RunProcess(flags, directory_).exit_code;
  };
  EXPECT_EQ(ask(daemon_->Address(), {}), 0);
  EXPECT_EQ(ask("unix:/nowhere", {"--service=" + daemon_->Address()}), 0);
  EXPECT_EQ(ask("unix:/nowhere", {}), 1);
  EXPECT_EQ(ask("nonsense", {}), 2);
  // Of several the first.
  EXPECT_EQ(ask(daemon_->Address() + ",unix:/nowhere", {}), 0);
  EXPECT_EQ(ask("unix:/nowhere," + daemon_->Address(), {}), 1);
  EXPECT_EQ(ask(daemon_->Address() + ",", {}), 2);
}

TEST_F(CliTest, VersionSaysWhichBuildItIs) {
  const ProcessResult version = BallastAlone({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.output,
              testing::MatchesRegex("ballast [0-9]+\\.[0-9]+\\.[0-9]+ \\(build [^ ]+\\)\n"));
}

TEST_F(CliTest, HistoryShowsTheLastSteps) {
  ASSERT_TRUE(rank_->Step(1, {}).ok());
  const json history = Json({"history", "gpt"});
  ASSERT_EQ(history["recent_steps"].size(), 2u);
  EXPECT_EQ(history["recent_steps"][1]["step"], 2);
  EXPECT_GT(history["recent_steps"][1]["seconds"], 0);
  EXPECT_THAT(Text({"history", "gpt"}),
              testing::ContainsRegex("step +norm +clip +lr +seconds +skipped because\n +1 "));
}

// What packages install is what this tool says.
TEST_F(CliTest, CompletionIsOfTheCommandsAndFlagsThatThereAre) {
  for (const auto& [shell, file] : {std::pair("bash", "ballast.bash"), {"zsh", "_ballast"}}) {
    const ProcessResult script = BallastAlone({"completion", shell});
    EXPECT_EQ(script.exit_code, 0) << script.error;
    EXPECT_EQ(script.output, ReadFile(std::string("deploy/completion/") + file))
        << "ballast completion " << shell << " >deploy/completion/" << file;
  }
  EXPECT_EQ(BallastAlone({"completion", "fish"}).exit_code, 2);
}

TEST_F(CliTest, BashCompletesCommandsFlagsAndJobs) {
  std::string service = daemon_->Address();  // Where it asks by itself.
  const auto complete = [&](const std::string& line) {
    // As a terminal would cut it into words.
    const ProcessResult done = RunProcess(
        {"/usr/bin/env", "BALLAST_SERVICE=" + service, "/bin/bash", "-c",
         "set -eu; source deploy/completion/ballast.bash; COMP_WORDS=(" + line +
             "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _ballast; echo \"${COMPREPLY[*]}\""},
        directory_);
    EXPECT_EQ(done.exit_code, 0) << line << ": " << done.error;
    return done.output;
  };
  const std::string ballast = kBin + "/ballast ";
  EXPECT_EQ(complete(ballast + "che"), "checkpoints\n");
  EXPECT_EQ(complete(ballast + "close --f"), "--force\n");
  EXPECT_EQ(complete(ballast + "plan --se"), "\n");
  EXPECT_EQ(complete(ballast + "job g"), "gpt\n");
  EXPECT_EQ(complete(ballast + "job --timeout 5 g"), "gpt\n");
  EXPECT_EQ(complete(ballast + "job gpt g"), "\n");
  EXPECT_EQ(complete(ballast + "state gpt wte --out = LICENS"), "LICENSE\n");
  EXPECT_EQ(complete(ballast + "help un"), "undo\n");
  service = "unix:/nowhere";
  const std::string cut = absl::StrReplaceAll(daemon_->Address(), {{":", " : "}});
  EXPECT_EQ(complete(ballast + "job g"), "\n");
  EXPECT_EQ(complete(ballast + "job --service " + cut + " g"), "gpt\n");
  EXPECT_EQ(complete(ballast + "job --service = " + cut + " g"), "gpt\n");
  EXPECT_EQ(complete(ballast + "job --service " + cut), "\n");
}

TEST_F(CliTest, SuggestsNamesThatAreThere) {
  ExpectFailure({"job", "gtp"});
  ExpectFailure({"state", "gpt", "wtee"});
  ExpectFailure({"state", "gpt", "wtee", "--out", directory_ + "/w.npy"});
  ExpectFailure({"set-group", "gpt", "nodecay", "--lr", "1"});
  ExpectFailure({"save", "gtp", "/nowhere"});
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/w.npy"));
}

TEST_F(CliTest, SaysInOneLineThatAFileCannotBeWritten) {
  ExpectFailure({"state", "gpt", "wte", "--out", directory_ + "/none/w.npy"});
}

// A socket of 127.0.0.1 that a service does not listen on.
class OtherListener {
 public:
  // `answer` is sent to every connection, which is closed then.
  explicit OtherListener(std::string answer)
      : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), answer_(std::move(answer)) {
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(name);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&name), bytes), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&name), &bytes), 0);
    EXPECT_EQ(listen(socket_, 8), 0);
    port_ = ntohs(name.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~OtherListener() {
    shutdown(socket_, SHUT_RDWR);  // Ends accept.
    thread_.join();
    close(socket_);
  }
  std::string Address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  void Run() {
    for (int peer = 0; (peer = accept(socket_, nullptr, nullptr)) >= 0; close(peer)) {
      char byte = 0;
      if (answer_.empty() || read(peer, &byte, 1) != 1) continue;
      EXPECT_EQ(send(peer, answer_.data(), answer_.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(answer_.size()));
    }
  }

  const int socket_;
  const std::string answer_;
  int port_ = 0;
  std::thread thread_;
};

TEST_F(CliTest, SaysInOneLineThatNoServiceAnswersAndWhy) {
  const auto expect_failure = [&](const std::string& address) {
    ExpectFailed(RunProcess({kBin + "/ballast", "jobs", "--service=" + address}, directory_), 1);
  };
  expect_failure("unix:" + directory_ + "/none");
  std::string nobody;
  {
    OtherListener other("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    nobody = other.Address();
    expect_failure(nobody);
  }
  expect_failure(nobody);
  expect_failure(OtherListener("").Address());
}

TEST_F(CliTest, WithWaitAReadIsMadeAgainUntilAServiceAnswers) {
  const std::string address = "unix:" + directory_ + "/later";
  const std::vector<std::string> jobs = {kBin + "/ballast", "jobs", "--service=" + address,
                                         "--json"};
  EXPECT_EQ(RunProcess(jobs, directory_).exit_code, 1);
  ProcessResult waited;
  std::filesystem::create_directories(directory_ + "/wait");
  std::thread reader([&] {
    std::vector<std::string> words = jobs;
    words.push_back("--wait=120");
    waited = RunProcess(words, directory_ + "/wait");
  });
  // It is in its wait now, or not yet there: it must find the service in either case.
  EXPECT_EQ(RunProcess(jobs, directory_).exit_code, 1);
  const Ballastd later(kBin + "/ballastd", {"--listen=" + address, "--memory-limit=512MiB"});
  EXPECT_NE(later.Address(), "") << later.Errors();
  reader.join();
  EXPECT_EQ(waited.exit_code, 0) << waited.error;
  EXPECT_EQ(json::parse(waited.output)["jobs"].size(), 0u);
  ExpectFailure({"jobs", "--wait=-1"}, 2);
}

// Goes away in the middle of its first answer, with other values than it has later.
class GoesAwayOnce : public v1::StateService::Service {
 public:
  grpc::Status ReadState(grpc::ServerContext*, const v1::ReadStateRequest*,
                         grpc::ServerWriter<v1::ReadStateResponse>* answer) override {
    const bool is_first = ++calls_ == 1;
    const std::vector<float> values(4, is_first ? 1 : 2);
    v1::ReadStateResponse part;
    part.set_step(calls_);
    part.add_shape(8);
    for (int64_t offset = 0; offset < 8; offset += 4) {
      part.set_offset(offset);
      part.set_data(std::string(reinterpret_cast<const char*>(values.data()), 16));
      answer->Write(part);
      if (is_first) return {grpc::StatusCode::UNAVAILABLE, "it has gone"};
    }
    return grpc::Status::OK;
  }
  int calls() const { return calls_; }

 private:
  std::atomic<int> calls_ = 0;
};

TEST_F(CliTest, WithWaitAPlaneThatWasCutOffIsReadFromItsBeginning) {
  GoesAwayOnce service;
  const std::string address = "unix:" + directory_ + "/goes-away";
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const std::string file = directory_ + "/w.npy";
  const ProcessResult read = RunProcess({kBin + "/ballast", "state", "gpt", "w", "--out=" + file,
                                         "--service=" + address, "--wait=120", "--json"},
                                        directory_);
  ASSERT_EQ(read.exit_code, 0) << read.error;
  EXPECT_EQ(service.calls(), 2);
  EXPECT_EQ(json::parse(read.output)["step"], 2);
  std::ifstream written(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(written), {}};
  ASSERT_GE(bytes.size(), 32u);
  std::vector<float> values(8);
  std::memcpy(values.data(), bytes.data() + bytes.size() - 32, 32);
  EXPECT_EQ(values, std::vector<float>(8, 2));
}

TEST_F(CliTest, WrongUsageExitsWithTwo) {
  EXPECT_EQ(Ballast({"jbos"}).exit_code, 2);
  EXPECT_EQ(RunProcess({kBin + "/ballast", "jobs", "--service="}, directory_).exit_code, 2);
  EXPECT_EQ(Ballast({"job"}).exit_code, 2);
  EXPECT_EQ(Ballast({"set-group", "gpt", "decay"}).exit_code, 2);
  EXPECT_EQ(Ballast({"save", "gpt", "relative/path"}).exit_code, 2);
  const ProcessResult help = RunProcess({kBin + "/ballast", "help"}, directory_);
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.output, HasSubstr("set-group JOB GROUP"));
}

TEST_F(CliTest, TheExampleInTheReadmeRuns) {
  const ProcessResult result =
      RunProcess({kBin + "/ballast-example", daemon_->Address()}, directory_);
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("step 200: w[0] = 1.0"));
}

TEST_F(CliTest, TheExampleInCFindsThePlane) {
  const ProcessResult result =
      RunProcess({kBin + "/ballast-c-example", daemon_->Address()}, directory_);
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.output, "step 400: loss 0.000000, w = 2.000 -3.000 0.500, b = 1.000\n");
}

}  // namespace
}  // namespace ballast::client
