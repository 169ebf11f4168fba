#include "tests/bench/load/load_service.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/home.h"
#include "cpu_optimizer_service/common/plan/homes.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/available_memory.h"
#include "cpu_optimizer_service/engine.h"
#include "server/server.h"

namespace ballast::bench {
namespace {

constexpr absl::Duration kStartLimit = absl::Seconds(60);
constexpr absl::Duration kPoll = absl::Milliseconds(5);

// Of those that have one.
std::vector<int> PortsOf(const std::vector<std::string>& addresses) {
  std::vector<int> ports;
  for (const std::string& address : addresses) {
    int port = 0;
    const size_t colon = address.rfind(':');
    if (colon != std::string::npos && absl::SimpleAtoi(address.substr(colon + 1), &port)) {
      ports.push_back(port);
    }
  }
  return ports;
}

// The first call gives the job its members.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectToOneOf(
    const std::vector<std::string>& addresses, int rank, JobSpec& job) {
  return client::ConnectHome(job.members.empty() ? absl::StrJoin(addresses, ",") : "", rank, job);
}

class RunningServices final : public LoadService {
 public:
  explicit RunningServices(std::vector<std::string> addresses) : addresses_(std::move(addresses)) {}
  absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel(int rank, JobSpec& job) override {
    return ConnectToOneOf(addresses_, rank, job);
  }
  std::vector<int> tcp_ports() const override { return PortsOf(addresses_); }

 private:
  const std::vector<std::string> addresses_;
};

class ServiceInside final : public LoadService {
 public:
  static absl::StatusOr<std::unique_ptr<LoadService>> Start(const LoadOptions& options) {
    auto self = std::make_unique<ServiceInside>(static_cast<int>(options.threads));
    BALLAST_ASSIGN_OR_RETURN(self->server_, server::Server::Start(self->engine_, {.listen = {}}));
    return self;
  }
  explicit ServiceInside(int threads)
      : engine_({.memory_limit_bytes = DefaultMemoryLimitBytes(), .threads = threads}) {}
  absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel(int rank, JobSpec& job) override {
    return server_->InProcessChannel();
  }

 private:
  Engine engine_;
  std::unique_ptr<server::Server> server_;
};

// A ballastd that ends with the object.
class OwnProcess {
 public:
  static absl::StatusOr<std::unique_ptr<OwnProcess>> Start(const LoadOptions& options) {
    std::string folder = (std::filesystem::temp_directory_path() / "ballast-bench.XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot make the folder ", folder));
    }
    std::unique_ptr<OwnProcess> self(new OwnProcess(folder));
    BALLAST_RETURN_IF_ERROR(self->Run(options));
    BALLAST_RETURN_IF_ERROR(self->AwaitAddress());
    return self;
  }

  ~OwnProcess() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);  // It holds nothing that is kept.
      waitpid(pid_, nullptr, 0);
    }
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  const std::string& address() const { return address_; }
  pid_t pid() const { return pid_; }

 private:
  explicit OwnProcess(std::string folder) : folder_(std::move(folder)) {}

  absl::Status Run(const LoadOptions& options) {
    std::error_code error;
    const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
    // Memory in common is reached over TCP too, since the kernel counts the bytes there.
    const std::string listen =
        options.way == Way::kUnixSocket ? absl::StrCat("unix:", folder_, "/socket") : "127.0.0.1:0";
    const std::vector<std::string> words = {
        (program.parent_path() / "ballastd").string(),
        absl::StrCat("--listen=", listen),
        absl::StrCat("--threads=", options.threads),
        absl::StrCat("--port-file=", folder_, "/address"),
        absl::StrCat("--shared-memory=", options.way == Way::kSharedMemory ? "auto" : "never"),
        "--holder=none",  // Its processor and memory are measured.
        "--startup-benchmark=false",
        "--log-level=warning"};
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const std::string log = folder_ + "/log";

    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ < 0) return absl::ErrnoToStatus(errno, "cannot start ballastd");
    if (pid_ > 0) return absl::OkStatus();
    // The child: it ends with its parent, however that ends. tests/support/processes.h needs
    // GoogleTest, which no benchmark has.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    const int fd = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    execv(arguments[0], arguments.data());
    _exit(127);
  }

  absl::Status AwaitAddress() {
    const absl::Time deadline = absl::Now() + kStartLimit;
    for (;;) {
      std::ifstream(folder_ + "/address") >> address_;
      if (!address_.empty()) return absl::OkStatus();
      const bool ended = waitpid(pid_, nullptr, WNOHANG) == pid_;
      if (ended) pid_ = -1;
      if (ended || absl::Now() > deadline) {
        return absl::UnavailableError(absl::StrCat("ballastd did not start: ", LastLine()));
      }
      absl::SleepFor(kPoll);
    }
  }

  std::string LastLine() const {
    std::ifstream file(folder_ + "/log");
    std::string last = "it printed nothing";
    for (std::string line; std::getline(file, line);) {
      if (!line.empty()) last = line;
    }
    return last;
  }

  const std::string folder_;
  pid_t pid_ = -1;
  std::string address_;
};

class OwnProcesses final : public LoadService {
 public:
  static absl::StatusOr<std::unique_ptr<LoadService>> Start(const LoadOptions& options) {
    auto self = std::make_unique<OwnProcesses>();
    for (int64_t member = 0; member < options.members; ++member) {
      BALLAST_ASSIGN_OR_RETURN(auto process, OwnProcess::Start(options));
      self->processes_.push_back(std::move(process));
    }
    return self;
  }

  absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel(int rank, JobSpec& job) override {
    return ConnectToOneOf(Addresses(), rank, job);
  }
  std::vector<pid_t> pids() const override {
    std::vector<pid_t> pids;
    for (const auto& process : processes_) pids.push_back(process->pid());
    return pids;
  }
  std::vector<int> tcp_ports() const override { return PortsOf(Addresses()); }

 private:
  std::vector<std::string> Addresses() const {
    std::vector<std::string> addresses;
    for (const auto& process : processes_) addresses.push_back(process->address());
    return addresses;
  }

  std::vector<std::unique_ptr<OwnProcess>> processes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LoadService>> LoadService::Start(const LoadOptions& options) {
  if (!options.service.empty()) {
    BALLAST_ASSIGN_OR_RETURN(auto addresses, ParseServices(options.service));
    return std::make_unique<RunningServices>(std::move(addresses));
  }
  if (options.way == Way::kInProcess) return ServiceInside::Start(options);
  return OwnProcesses::Start(options);
}

}  // namespace ballast::bench
