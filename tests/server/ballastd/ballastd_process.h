// The binary, BALLASTD_PATH, as a child process.
#ifndef BALLAST_TESTS_SERVER_BALLASTD_BALLASTD_PROCESS_H_
#define BALLAST_TESTS_SERVER_BALLASTD_BALLASTD_PROCESS_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace ballast::server {

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A ballastd process. Its standard error goes to a file.
class Ballastd {
 public:
  explicit Ballastd(std::vector<std::string> flags)
      : directory_(testing::TempDir() + "ballastd_" + std::to_string(getpid()) + "_" +
                   std::to_string(++started_)) {
    std::filesystem::create_directories(directory_);
    flags.insert(flags.begin(), BALLASTD_PATH);
    flags.push_back("--port-file=" + PortFile());
    // Its time and its memory are not the test's, unless that is of it.
    if (std::count(flags.begin(), flags.end(), "--startup-benchmark=true") == 0) {
      flags.push_back("--startup-benchmark=false");
    }
    std::vector<char*> arguments;
    for (std::string& flag : flags) arguments.push_back(flag.data());
    arguments.push_back(nullptr);
    const std::string errors = directory_ + "/stderr";
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open(errors.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      execv(arguments[0], arguments.data());
      _exit(127);
    }
  }
  ~Ballastd() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    std::filesystem::remove_all(directory_);
  }

  // Where it listens. Waits until it does; empty if it ends instead.
  std::string Address() {
    while (!std::filesystem::exists(PortFile())) {
      siginfo_t info = {};
      waitid(P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT);
      if (info.si_pid != 0) return "";
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::string address = ReadFile(PortFile());
    return address.substr(0, address.find('\n'));
  }
  pid_t pid() const { return pid_; }
  void Signal(int signal) { kill(pid_, signal); }
  int ExitCode() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  std::string Errors() const { return ReadFile(directory_ + "/stderr"); }
  const std::string& directory() const { return directory_; }

 private:
  std::string PortFile() const { return directory_ + "/ports"; }

  static inline int started_ = 0;
  const std::string directory_;
  pid_t pid_ = -1;
};

}  // namespace ballast::server

#endif  // BALLAST_TESTS_SERVER_BALLASTD_BALLASTD_PROCESS_H_
