// The binary: its one-line errors, and a short run of one and of two workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/system/sha256.h"
#include "gpu_worker/run/loss_log.h"
#include "tests/gpu_worker/held_port.h"
#include "tests/gpu_worker/temp_path.h"
#include "tests/support/certificates.h"
#include "tests/support/messages.h"
#include "tests/support/processes.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;
using testing::Not;

// A model and a text of a few kilobytes.
const std::vector<std::string> kTiny = {"--text=LICENSE", "--layers=1",       "--width=16",
                                        "--heads=2",      "--context=16",     "--batch=2",
                                        "--steps=2",      "--optimizer=local"};

struct Settings {
  std::vector<std::string> flags = {};  // After those of kTiny.
  std::map<std::string, std::string> environment = {};
  // A command that becomes the worker.
  std::vector<std::string> through = {};
};

std::vector<std::string> WorkerWords(const Settings& settings) {
  std::vector<std::string> words = settings.through;
  words.insert(words.end(),
               {"/usr/bin/env", "-uRANK", "-uWORLD_SIZE", "-uMASTER_ADDR", "-uMASTER_PORT"});
  for (const auto& [name, value] : settings.environment) words.push_back(name + "=" + value);
  words.push_back(BALLAST_WORKER_PATH);
  words.insert(words.end(), kTiny.begin(), kTiny.end());
  words.insert(words.end(), settings.flags.begin(), settings.flags.end());
  return words;
}

struct Worker : Process {
  explicit Worker(const Settings& settings) : Process(WorkerWords(settings)) {}
};

// Serves when the constructor returns.
struct Service : Ballastd {
  explicit Service(const std::string& address, std::vector<std::string> flags = {})
      : Ballastd(BALLASTD_PATH, With(std::move(flags), address)) {
    EXPECT_EQ(Address(), address) << Errors();
  }

 private:
  static std::vector<std::string> With(std::vector<std::string> flags, const std::string& address) {
    flags.insert(flags.end(), {"--listen=" + address, "--log-level=error"});
    return flags;
  }
};

// Runs a worker that must fail; expects one line and returns it.
void ExpectFailure(const Settings& settings) {
  Worker worker(settings);
  EXPECT_EQ(worker.ExitCode(), 1);
  const std::string errors = worker.Errors();
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  EXPECT_TRUE(Says(absl::StripSuffix(errors, "\n")));
}

std::vector<Settings> World(int port, std::vector<std::string> flags_of_rank_1) {
  std::vector<Settings> world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world[rank].flags = {"--peer-timeout=60s"};
    world[rank].environment = {
        {"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", std::to_string(port)}};
  }
  world[1].flags.insert(world[1].flags.end(), flags_of_rank_1.begin(), flags_of_rank_1.end());
  return world;
}

TEST(BallastWorker, RefusesWhatItCannotTrainOnInOneLine) {
  ExpectFailure({.flags = {"--text=/nowhere"}});
  ExpectFailure({.flags = {"--text=/dev/zero"}});
  ExpectFailure({.flags = {"--batch=2000000000"}});
}

TEST(BallastWorker, RefusesWrongFlagsInOneLine) {
  ExpectFailure({.flags = {"stray"}});
  ExpectFailure({.environment = {{"WORLD_SIZE", "2"}, {"RANK", "2"}}});
  ExpectFailure({.flags = {"--dtype=fp16", "--initial-scale-power=99"}});
  ExpectFailure({.flags = {"--dtype=fp16", "--loss-scale-window=0"}});
  ExpectFailure({.flags = {"--dtype=fp16", "--loss-scale-hysteresis=0"}});
  ExpectFailure({.flags = {"--dtype=fp16", "--min-loss-scale=0"}});
  ExpectFailure({.flags = {"--optimizer=service", "--service=a:7070,b:7070"}});
}

TEST(BallastWorker, SaysThatNoServiceAnswers) {
  const HeldPort held;
  const std::string address = "127.0.0.1:" + std::to_string(held.port());
  ExpectFailure({.flags = {"--optimizer=service"}, .environment = {{"BALLAST_SERVICE", address}}});
}

TEST(BallastWorker, SaysWhichBuildItIs) {
  Worker worker({.flags = {"--version"}});
  EXPECT_EQ(worker.ExitCode(), 0);
  EXPECT_THAT(worker.Output(),
              testing::MatchesRegex("ballast-worker [0-9]+\\.[0-9]+\\.[0-9]+ \\(build [^ ]+\\)\n"));
}

TEST(BallastWorker, ClosesTheJobAtTheEndOnceItIsSaved) {
  const TempPath saved("saved");
  const HeldPort held;
  const std::string address = "127.0.0.1:" + std::to_string(held.port());
  const Service service(address, {"--checkpoint-dir=" + saved.str()});
  const auto run = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--optimizer=service", "--service=" + address, "--job=ends"});
    Worker worker({.flags = std::move(flags)});
    EXPECT_EQ(worker.ExitCode(), 0) << worker.Errors();
  };
  // Of the job that is saved there, and nothing else is.
  const auto uid_in = [&](const std::string& folder) {
    for (const auto& entry : std::filesystem::directory_iterator(saved.str() + "/" + folder)) {
      if (!entry.is_directory()) continue;
      const std::string index = ReadFile(entry.path().string() + "/index.json");
      const size_t uid = index.find("\"uid\"");
      return uid == std::string::npos ? "" : index.substr(uid, 48);
    }
    return std::string();
  };
  run({"--close-at-end"});
  // A job that is still there would go on under its own uid, and load nothing.
  run({"--resume=ends", "--steps=3", "--save=later", "--close-at-end"});
  EXPECT_NE(uid_in("ends"), "");
  EXPECT_NE(uid_in("later"), "");
  EXPECT_NE(uid_in("ends"), uid_in("later"));
}

TEST(BallastWorker, NamesATakenMasterPortInOneLine) {
  const HeldPort held;
  held.Listen();
  const std::string port = std::to_string(held.port());
  ExpectFailure({.environment = {{"WORLD_SIZE", "2"}, {"MASTER_PORT", port}}});
}

TEST(BallastWorker, AFullFileSystemLeavesNothing) {
  const TempPath out("worker_out");
  ExpectFailure({.flags = {"--out=" + out.str()}, .through = {"/usr/bin/prlimit", "--fsize=4096"}});
  // The steps that were done are recorded; no file marks the run as over, and none is torn.
  EXPECT_TRUE(std::filesystem::exists(out.str() + "/losses.csv"));
  for (const char* name : {"weights.bin", "worker.json"}) {
    EXPECT_FALSE(std::filesystem::exists(out.str() + "/" + name));
    EXPECT_FALSE(std::filesystem::exists(out.str() + "/" + name + ".partial"));
  }
}

TEST(BallastWorker, TrainsWithAServiceOfItsOwn) {
  const TempPath out("worker_out");
  Worker worker({.flags = {"--optimizer=service", "--service=in-process", "--threads=2",
                           "--out=" + out.str()}});
  EXPECT_EQ(worker.ExitCode(), 0);
  EXPECT_THAT(worker.Errors(), Not(HasSubstr("TBB")));
  EXPECT_TRUE(std::filesystem::exists(out.str() + "/worker.json"));
}

TEST(BallastWorker, TrainsOverTlsWithATokenOrACertificate) {
  const TempPath folder("credentials");
  std::filesystem::create_directories(folder.str());
  const auto file = [&](const std::string& name) { return folder.str() + "/" + name; };
  const TestAuthority authority(folder.str(), "ca");
  for (const char* name : {"service", "worker"}) authority.Issue(name, {.common_name = name});
  WritePrivateFile(file("token"), "a-token\n");
  WritePrivateFile(file("wrong"), "another-token\n");
  Sha256 digest;
  digest.Add("a-token");
  WritePrivateFile(file("tokens"), "ci " + digest.Hex() + "\n");
  WritePrivateFile(file("roles"), "trainer * token:ci\ntrainer * cert:worker\n");
  const HeldPort held;
  const std::string address = "127.0.0.1:" + std::to_string(held.port());
  const Service service(
      address, {"--tls-cert=" + file("service.pem"), "--tls-key=" + file("service.key"),
                "--tls-client-ca=" + authority.certificate(), "--roles-file=" + file("roles"),
                "--tokens-file=" + file("tokens")});
  int job = 0;
  const auto settings = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--optimizer=service", "--service=" + address,
                               "--job=job-" + std::to_string(++job)});
    return Settings{.flags = std::move(flags)};
  };
  const std::string ca = "--tls-ca=" + authority.certificate();
  const std::string token = "--token-file=" + file("token");
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{ca, token},
        {ca, "--tls-cert=" + file("worker.pem"), "--tls-key=" + file("worker.key")}}) {
    Worker worker(settings(flags));
    EXPECT_EQ(worker.ExitCode(), 0) << worker.Errors();
  }
  Settings of_environment = settings({});
  of_environment.environment = {{"BALLAST_TLS_CA", authority.certificate()},
                                {"BALLAST_TOKEN_FILE", file("token")}};
  Worker worker(of_environment);
  EXPECT_EQ(worker.ExitCode(), 0) << worker.Errors();
  ExpectFailure(settings({ca, "--token-file=" + file("wrong")}));
  ExpectFailure(settings({ca}));
  ExpectFailure(settings({token}));
}

TEST(BallastWorker, TwoOfOneJobTrainTogether) {
  const HeldPort held;
  const std::vector<Settings> world = World(held.port(), {});
  Worker rank_0(world[0]), rank_1(world[1]);
  EXPECT_EQ(rank_0.ExitCode(), 0) << rank_0.Errors();
  EXPECT_EQ(rank_1.ExitCode(), 0) << rank_1.Errors();
}

TEST(BallastWorker, OneThatWasStartedOtherwiseIsNamedByAll) {
  const TempPath other_text("other_text");
  std::ofstream(other_text.str()) << std::string(1000, 'x');
  const std::map<std::string, std::string> flag_and_name = {
      {"--width=32", "--width"},
      {"--micro-steps=3", "--micro-steps"},
      {"--accumulate=worker", "--accumulate"},
      {"--dtype=fp32", "--wire-dtype"},
      {"--text=" + other_text.str(), "--text (its contents)"}};
  for (const auto& [flag, name] : flag_and_name) {
    const HeldPort held;
    const std::vector<Settings> world = World(held.port(), {flag});
    Worker rank_0(world[0]), rank_1(world[1]);
    for (Worker* worker : {&rank_0, &rank_1}) {
      EXPECT_EQ(worker->ExitCode(), 1);
      EXPECT_THAT(worker->Errors(), HasSubstr(name + ";"));
    }
  }
}

TEST(BallastWorker, TrainsInEveryWayWithAServiceOfItsOwn) {
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"--accumulate=worker", "--micro-steps=3"},
        std::vector<std::string>{"--dtype=fp16", "--initial-scale-power=10"},
        std::vector<std::string>{"--dtype=fp32", "--wire-dtype=bf16", "--update=wait",
                                 "--shared-memory=never", "--check-gradients",
                                 "--seal-timeout=30s"}}) {
    Settings settings{.flags = {"--optimizer=service", "--service=in-process"}};
    settings.flags.insert(settings.flags.end(), flags.begin(), flags.end());
    Worker worker(settings);
    EXPECT_EQ(worker.ExitCode(), 0) << worker.Errors();
  }
}

TEST(BallastWorker, SaysHowTheServiceHoldsTheState) {
  const TempPath out("worker_out");
  for (const std::string state : {"8bit", "fp32"}) {
    // Of width 8 all matrices have fewer than 4,096 elements.
    Worker worker({.flags = {"--optimizer=service", "--service=in-process", "--state=8bit",
                             "--out=" + out.str(), state == "8bit" ? "--width=16" : "--width=8"}});
    EXPECT_EQ(worker.ExitCode(), 0) << worker.Errors();
    EXPECT_THAT(ReadFile(out.str() + "/worker.json"), HasSubstr("\"state\": \"" + state + "\""));
  }
}

TEST(BallastWorker, ALostPeerIsNamedInOneLine) {
  const HeldPort held;
  std::vector<Settings> world = World(held.port(), {});
  const TempPath out("worker_out");
  world[0].flags.insert(world[0].flags.end(), {"--steps=1000000", "--out=" + out.str()});
  world[1].flags.push_back("--steps=1000000");
  Worker rank_0(world[0]);
  {
    Worker rank_1(world[1]);
    // Rank 0 makes the directory when all ranks have met.
    while (!std::filesystem::exists(out.str()) && rank_0.IsRunning()) usleep(10000);
  }  // Kills it.
  EXPECT_EQ(rank_0.ExitCode(), 3);
  EXPECT_THAT(rank_0.Errors(), HasSubstr("rank 1"));
}

int LinesOf(const std::string& path) {
  const std::string contents = ReadFile(path);
  return static_cast<int>(std::count(contents.begin(), contents.end(), '\n'));
}

// What a supervisor does: one is killed, the rest end by themselves, all are started again with the
// flags that they had.
TEST(BallastWorker, KilledWorkersGoOnWhereTheServiceStands) {
  constexpr int kSteps = 200;  // Far more than are done while one is being killed.
  const TempPath undisturbed("undisturbed"), out("out"), socket("service");
  const HeldPort held;
  const int port = held.port();
  const auto world = [&](std::vector<std::string> flags) {
    std::vector<Settings> settings = World(port, {});
    flags.push_back("--steps=" + std::to_string(kSteps));
    for (Settings& rank : settings) {
      rank.flags.insert(rank.flags.end(), flags.begin(), flags.end());
    }
    return settings;
  };
  {
    const std::vector<Settings> settings = world({"--out=" + undisturbed.str()});
    Worker rank_0(settings[0]), rank_1(settings[1]);
    ASSERT_EQ(rank_0.ExitCode(), 0) << rank_0.Errors();
    ASSERT_EQ(rank_1.ExitCode(), 0) << rank_1.Errors();
  }
  const Service service("unix:" + socket.str());
  const std::vector<Settings> settings =
      world({"--out=" + out.str(), "--optimizer=service", "--service=unix:" + socket.str(),
             "--seal-timeout=30s", "--peer-timeout=30s"});
  const std::string losses = out.str() + "/losses.csv";
  int lines = 0;
  for (const int victim : {0, 1, 1, 0}) {
    Worker rank_0(settings[0]), rank_1(settings[1]);
    lines += 7;  // The header, and some steps more than the last time.
    while (LinesOf(losses) < lines) usleep(1000);
    (victim == 0 ? rank_0 : rank_1).Kill();
    Worker& other = victim == 0 ? rank_1 : rank_0;
    EXPECT_NE(other.ExitCode(), 0);
    // In a collective, or, should the other have died just before its seal, there.
    EXPECT_THAT(other.Errors(), HasSubstr("rank " + std::to_string(victim)));
  }
  {
    Worker rank_0(settings[0]), rank_1(settings[1]);
    EXPECT_EQ(rank_0.ExitCode(), 0) << rank_0.Errors();
    EXPECT_EQ(rank_1.ExitCode(), 0) << rank_1.Errors();
  }
  EXPECT_TRUE(ReadFile(out.str() + "/weights.bin") == ReadFile(undisturbed.str() + "/weights.bin"));
  const std::vector<StepReport> expected =
      ParseLossesCsv(ReadFile(undisturbed.str() + "/losses.csv"));
  const std::vector<StepReport> reports = ParseLossesCsv(ReadFile(losses));
  // A death between a step's commit and its line may cost that line.
  ASSERT_GE(reports.size(), kSteps - 4);
  ASSERT_EQ(LinesOf(losses), reports.size() + 1);
  EXPECT_EQ(reports.back().step, kSteps);
  for (const StepReport& report : reports) {
    EXPECT_EQ(report.loss, expected[report.step - 1].loss) << "step " << report.step;
  }
  EXPECT_THAT(ReadFile(out.str() + "/worker.json"),
              HasSubstr("\"coverage_complete_steps\": " + std::to_string(kSteps)));
}

}  // namespace
}  // namespace ballast::worker
