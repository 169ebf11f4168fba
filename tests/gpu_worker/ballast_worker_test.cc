// The binary: its one-line errors, and a short run of one and of two workers.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "gpu_worker/socket.h"
#include "tests/gpu_worker/temp_path.h"

namespace ballast::worker {
namespace {

using testing::AllOf;
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

// A ballast-worker process.
class Worker {
 public:
  explicit Worker(const Settings& settings)
      : errors_("worker_" + std::to_string(++started_) + ".err") {
    std::vector<std::string> words = {BALLAST_WORKER_PATH};
    words.insert(words.end(), kTiny.begin(), kTiny.end());
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
  ~Worker() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

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

// Runs a worker that must fail; expects one line and returns it.
std::string FailureOf(const Settings& settings) {
  Worker worker(settings);
  EXPECT_EQ(worker.Wait(), 1);
  const std::string errors = worker.Errors();
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  EXPECT_THAT(errors, StartsWith("ballast-worker: "));
  return errors;
}

// A port on which nobody listens and that nobody else takes while `held` lives.
int HoldPort(const Socket& held) {
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(bind(held.descriptor(), reinterpret_cast<const sockaddr*>(&loopback), sizeof(loopback)),
            0);
  return held.port();
}

Socket NewSocket() {
  Socket made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;  // Rank 0 may listen where this one is only bound.
  setsockopt(made.descriptor(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  return made;
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
  EXPECT_THAT(FailureOf({.flags = {"--optimizer=service", "--save=relative"}}),
              HasSubstr("--save=relative must be an absolute path"));
  EXPECT_THAT(FailureOf({.environment = {{"WORLD_SIZE", "2"}, {"RANK", "2"}}}),
              HasSubstr("RANK=2 must be less than WORLD_SIZE=2"));
}

TEST(BallastWorker, SaysThatNoServiceAnswers) {
  const Socket held = NewSocket();
  const std::string address = "127.0.0.1:" + std::to_string(HoldPort(held));
  EXPECT_THAT(FailureOf({.flags = {"--optimizer=service", "--service=" + address}}),
              HasSubstr(address));
}

TEST(BallastWorker, AFullFileSystemLeavesNothing) {
  const TempPath out("worker_out");
  EXPECT_THAT(FailureOf({.flags = {"--out=" + out.str()}, .file_bytes = 4096}),
              AllOf(HasSubstr("cannot write"), HasSubstr("File too large")));
  EXPECT_TRUE(std::filesystem::is_empty(out.str()));
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
  const Socket held = NewSocket();
  const std::vector<Settings> world = World(HoldPort(held), {});
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
      {"--text=" + other_text.str(), "--text (its contents)"}};
  for (const auto& [flag, name] : flag_and_name) {
    const Socket held = NewSocket();
    const std::vector<Settings> world = World(HoldPort(held), {flag});
    Worker rank_0(world[0]), rank_1(world[1]);
    for (Worker* worker : {&rank_0, &rank_1}) {
      EXPECT_EQ(worker->Wait(), 1);
      EXPECT_THAT(worker->Errors(), HasSubstr("rank 1 and rank 0 were started differently: they "
                                              "differ in " +
                                              name + ";"));
    }
  }
}

TEST(BallastWorker, ALostPeerIsNamedInOneLine) {
  const Socket held = NewSocket();
  std::vector<Settings> world = World(HoldPort(held), {});
  const TempPath out("worker_out");
  world[0].flags.insert(world[0].flags.end(), {"--steps=1000000", "--out=" + out.str()});
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

}  // namespace
}  // namespace ballast::worker
