// Starts the project's binaries and reads their output.
#ifndef BALLAST_TESTS_CLIENT_PROCESSES_FOR_TESTS_H_
#define BALLAST_TESTS_CLIENT_PROCESSES_FOR_TESTS_H_

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace ballast::client {

inline std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream contents;
  contents << in.rdbuf();
  return contents.str();
}

// Starts a program with its output and errors in files. -1 if it cannot be started.
inline pid_t StartProcess(const std::vector<std::string>& words, const std::string& output_path,
                          const std::string& error_path) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, output_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC,
                                   0644);
  posix_spawn_file_actions_addopen(&actions, 2, error_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC,
                                   0644);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t pid = -1;
  const int error =
      posix_spawn(&pid, words[0].c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  return error == 0 ? pid : -1;
}

// The exit code; 128 and the signal's number if one ended it.
inline int AwaitProcess(pid_t pid) {
  int status = 0;
  if (waitpid(pid, &status, 0) != pid) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

struct ProcessResult {
  int exit_code = 0;
  std::string output;
  std::string error;
};

inline ProcessResult RunProcess(const std::vector<std::string>& words,
                                const std::string& directory) {
  const std::string output_path = directory + "/stdout";
  const std::string error_path = directory + "/stderr";
  const pid_t pid = StartProcess(words, output_path, error_path);
  ProcessResult result;
  result.exit_code = pid < 0 ? -1 : AwaitProcess(pid);
  result.output = ReadFile(output_path);
  result.error = ReadFile(error_path);
  return result;
}

// A ballastd on a port that the system chose, stopped with the object.
class DaemonForTests {
 public:
  DaemonForTests(const std::string& bin, const std::string& directory) {
    const std::string port_file = directory + "/port";
    pid_ = StartProcess({bin + "/ballastd", "--listen=127.0.0.1:0", "--memory_limit=512MiB",
                         "--startup-benchmark=false", "--port_file=" + port_file},
                        directory + "/ballastd.out", directory + "/ballastd.err");
    // The file appears when the service listens. A daemon that died never writes it.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (address_.empty() && std::chrono::steady_clock::now() < deadline) {
      std::ifstream(port_file) >> address_;
      if (address_.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  ~DaemonForTests() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    AwaitProcess(pid_);
  }
  const std::string& address() const { return address_; }  // Empty if it did not start.

 private:
  pid_t pid_ = -1;
  std::string address_;
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_PROCESSES_FOR_TESTS_H_
