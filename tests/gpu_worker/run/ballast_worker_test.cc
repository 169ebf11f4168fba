// The binary: its one-line errors, and a short run of one and of two workers.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "client/connect.h"
#include "client/session.h"
#include "gpu_worker/run/loss_log.h"
#include "tests/gpu_worker/held_port.h"
#include "tests/gpu_worker/temp_path.h"

namespace ballast::worker {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// A model and a text of a few kilobytes.
const std::vector<std::string> kTiny = {"--text=LICENSE", "--layers=1",       "--width=16",
                                        "--heads=2",      "--context=16",     "--batch=2",
                                        "--steps=2",      "--optimizer=local"};

struct Settings {
  std::vector<std::string> flags = {};  // After those of kTiny.
  std::map<std::string, std::string> environment = {};
  rlim_t file_bytes = RLIM_INFINITY;
};

// A process of this project, killed at the latest when this is destroyed.
class Process {
 public:
  Process(std::vector<std::string> words, const Settings& settings)
      : errors_("process_" + std::to_string(++started_) + ".err") {
    words.insert(words.end(), settings.flags.begin(), settings.flags.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open(errors_.str().c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
      for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) unsetenv(name);
      for (const auto& [name, value] : settings.environment) setenv(name.c_str(), value.c_str(), 1);
      if (settings.file_bytes != RLIM_INFINITY) {
        const rlimit limit{.rlim_cur = settings.file_bytes, .rlim_max = settings.file_bytes};
        setrlimit(RLIMIT_FSIZE, &limit);
      }
      execv(arguments[0], arguments.data());
      _exit(127);
    }
  }
  ~Process() { Kill(); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  // Its exit code, or minus the signal that ended it.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  std::string Errors() const {
    std::ifstream file(errors_.str());
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

 private:
  inline static int started_ = 0;
  const TempPath errors_;
  pid_t pid_ = -1;
};

std::vector<std::string> WorkerWords() {
  std::vector<std::string> words = {BALLAST_WORKER_PATH};
  words.insert(words.end(), kTiny.begin(), kTiny.end());
  return words;
}

struct Worker : Process {
  explicit Worker(const Settings& settings) : Process(WorkerWords(), settings) {}
};

// A ballastd that serves when the constructor returns.
struct Daemon : Process {
  explicit Daemon(const std::string& address)
      : Process({BALLASTD_PATH}, {.flags = {"--listen=" + address, "--log-level=error"}}) {
    EXPECT_TRUE(client::Connect(address, absl::Seconds(30)).ok());
  }
};

// Runs a worker that must fail; expects one line and returns it.
std::string FailureOf(const Settings& settings) {
  Worker worker(settings);
  EXPECT_EQ(worker.Wait(), 1);
  const std::string errors = worker.Errors();
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  EXPECT_THAT(errors, StartsWith("ballast-worker: "));
  return errors;
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
  EXPECT_THAT(FailureOf({.flags = {"--text=/nowhere"}}),
              HasSubstr("cannot read the text /nowhere"));
  EXPECT_THAT(FailureOf({.flags = {"--text=/dev/zero"}}), HasSubstr("cannot read the text"));
  EXPECT_THAT(FailureOf({.flags = {"--batch=2000000000"}}), HasSubstr("--batch=2000000000"));
  EXPECT_THAT(FailureOf({.flags = {"--layers=16384", "--width=16384"}}), HasSubstr("GiB a rank"));
}

TEST(BallastWorker, RefusesWrongFlagsInOneLine) {
  EXPECT_THAT(FailureOf({.flags = {"stray"}}), HasSubstr("unexpected argument 'stray'"));
  EXPECT_THAT(FailureOf({.flags = {"--peer-timeout=0s"}}), HasSubstr("--peer-timeout=0"));
  EXPECT_THAT(FailureOf({.flags = {"--optimizer=service", "--save=relative/path"}}),
              HasSubstr("--save=relative/path must be a name under the service"));
  EXPECT_THAT(FailureOf({.environment = {{"WORLD_SIZE", "2"}, {"RANK", "2"}}}),
              HasSubstr("RANK=2 must be less than WORLD_SIZE=2"));
  EXPECT_THAT(FailureOf({.flags = {"--accumulate=nowhere"}}),
              HasSubstr("--accumulate=nowhere must be service or worker"));
  EXPECT_THAT(FailureOf({.flags = {"--min-loss-scale=2"}}),
              HasSubstr("--min-loss-scale is for fp16 gradients"));
  for (const std::string flag :
       {"--service=127.0.0.1:1", "--update=wait", "--seal-timeout=3s", "--shared-memory=never",
        "--reconnect-timeout=3s", "--resume=/there", "--save=/there"}) {
    EXPECT_THAT(FailureOf({.flags = {flag}}),
                HasSubstr(flag.substr(0, flag.find('=')) + " is for the service"));
  }
  EXPECT_THAT(FailureOf({.flags = {"--update=never"}}),
              HasSubstr("--update=never must be speculate or wait"));
  EXPECT_THAT(FailureOf({.flags = {"--optimizer=service", "--shared-memory=always"}}),
              HasSubstr("--shared-memory=always must be auto or never"));
  EXPECT_THAT(FailureOf({.flags = {"--dtype=fp8"}}),
              HasSubstr("--dtype=fp8 must be bf16 or fp16 or fp32"));
  EXPECT_THAT(FailureOf({.flags = {"--wire-dtype=fp64"}}),
              HasSubstr("--wire-dtype=fp64 must be bf16 or fp16 or fp32"));
  EXPECT_THAT(FailureOf({.flags = {"--seal-timeout=-1s"}}),
              HasSubstr("--seal-timeout=-1s must be between 1ms and"));
  EXPECT_THAT(FailureOf({.flags = {"--dtype=fp16", "--initial-scale-power=99"}}),
              HasSubstr("initial_scale_power is 99, expected 0 to"));
  EXPECT_THAT(FailureOf({.flags = {"--dtype=fp16", "--loss-scale-window=0"}}),
              HasSubstr("window is 0"));
  EXPECT_THAT(FailureOf({.flags = {"--dtype=fp16", "--loss-scale-hysteresis=0"}}),
              HasSubstr("hysteresis is 0"));
  EXPECT_THAT(FailureOf({.flags = {"--dtype=fp16", "--min-loss-scale=0"}}),
              HasSubstr("min_scale is 0"));
}

TEST(BallastWorker, SaysThatNoServiceAnswers) {
  const HeldPort held;
  const std::string address = "127.0.0.1:" + std::to_string(held.port());
  EXPECT_THAT(FailureOf({.flags = {"--optimizer=service", "--service=" + address}}),
              HasSubstr(address));
}

TEST(BallastWorker, NamesATakenMasterPortInOneLine) {
  const HeldPort held;
  held.Listen();
  const std::string port = std::to_string(held.port());
  EXPECT_THAT(FailureOf({.environment = {{"WORLD_SIZE", "2"}, {"MASTER_PORT", port}}}),
              HasSubstr("rank 0: cannot listen on 127.0.0.1:" + port + "; choose another"));
}

TEST(BallastWorker, AFullFileSystemLeavesNothing) {
  const TempPath out("worker_out");
  EXPECT_THAT(FailureOf({.flags = {"--out=" + out.str()}, .file_bytes = 4096}),
              AllOf(HasSubstr("cannot write"), HasSubstr("File too large")));
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
  EXPECT_EQ(worker.Wait(), 0);
  EXPECT_THAT(worker.Errors(), Not(HasSubstr("TBB")));
  EXPECT_TRUE(std::filesystem::exists(out.str() + "/worker.json"));
}

TEST(BallastWorker, TwoOfOneJobTrainTogether) {
  const HeldPort held;
  const std::vector<Settings> world = World(held.port(), {});
  Worker rank_0(world[0]), rank_1(world[1]);
  EXPECT_EQ(rank_0.Wait(), 0) << rank_0.Errors();
  EXPECT_EQ(rank_1.Wait(), 0) << rank_1.Errors();
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
      EXPECT_EQ(worker->Wait(), 1);
      EXPECT_THAT(worker->Errors(), HasSubstr("rank 1 and rank 0 were started differently: they "
                                              "differ in " +
                                              name + ";"));
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
    EXPECT_EQ(worker.Wait(), 0) << worker.Errors();
  }
}

TEST(BallastWorker, ALostPeerIsNamedInOneLine) {
  const HeldPort held;
  std::vector<Settings> world = World(held.port(), {});
  const TempPath out("worker_out");
  world[0].flags.insert(world[0].flags.end(),
                        {"--steps=1000000", "--peer-timeout=10s", "--out=" + out.str()});
  world[1].flags.push_back("--steps=1000000");
  Worker rank_0(world[0]);
  {
    Worker rank_1(world[1]);
    // Rank 0 makes the directory when all ranks have met.
    while (!std::filesystem::exists(out.str())) usleep(10000);
  }  // Kills it.
  EXPECT_EQ(rank_0.Wait(), 1);
  EXPECT_THAT(rank_0.Errors(), HasSubstr("lost rank 1"));
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int LinesOf(const std::string& path) {
  const std::string contents = ReadAll(path);
  return static_cast<int>(std::count(contents.begin(), contents.end(), '\n'));
}

// What a supervisor does: one is killed, the rest end by themselves, all are started again with the
// flags that they had.
TEST(BallastWorker, KilledWorkersGoOnWhereTheServiceStands) {
  constexpr int kSteps = 60;
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
    ASSERT_EQ(rank_0.Wait(), 0) << rank_0.Errors();
    ASSERT_EQ(rank_1.Wait(), 0) << rank_1.Errors();
  }
  const Daemon service("unix:" + socket.str());
  const std::vector<Settings> settings =
      world({"--out=" + out.str(), "--optimizer=service", "--service=unix:" + socket.str(),
             "--seal-timeout=5s", "--peer-timeout=5s"});
  const std::string losses = out.str() + "/losses.csv";
  int lines = 0;
  for (const int victim : {0, 1, 1, 0}) {
    Worker rank_0(settings[0]), rank_1(settings[1]);
    lines += 7;  // The header, and some steps more than the last time.
    while (LinesOf(losses) < lines) usleep(1000);
    (victim == 0 ? rank_0 : rank_1).Kill();
    Worker& other = victim == 0 ? rank_1 : rank_0;
    EXPECT_EQ(other.Wait(), 1);
    // In a collective, or, should the other have died just before its seal, there.
    const std::string name = "rank " + std::to_string(victim);
    EXPECT_THAT(other.Errors(), AnyOf(HasSubstr("lost " + name), HasSubstr("not sealed: " + name)));
  }
  {
    Worker rank_0(settings[0]), rank_1(settings[1]);
    EXPECT_EQ(rank_0.Wait(), 0) << rank_0.Errors();
    EXPECT_EQ(rank_1.Wait(), 0) << rank_1.Errors();
  }
  EXPECT_TRUE(ReadAll(out.str() + "/weights.bin") == ReadAll(undisturbed.str() + "/weights.bin"));
  const std::vector<StepReport> expected =
      ParseLossesCsv(ReadAll(undisturbed.str() + "/losses.csv"));
  const std::vector<StepReport> reports = ParseLossesCsv(ReadAll(losses));
  ASSERT_EQ(reports.size(), kSteps);
  ASSERT_EQ(LinesOf(losses), kSteps + 1);
  for (int i = 0; i < kSteps; ++i) {
    EXPECT_EQ(reports[i].step, i + 1);
    EXPECT_EQ(reports[i].loss, expected[i].loss) << "step " << i + 1;
  }
  EXPECT_THAT(ReadAll(out.str() + "/worker.json"),
              HasSubstr("\"coverage_complete_steps\": " + std::to_string(kSteps)));
}

}  // namespace
}  // namespace ballast::worker
