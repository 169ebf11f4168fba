// Programs as processes of a test, and what they write.
#ifndef BALLAST_TESTS_SUPPORT_PROCESSES_H_
#define BALLAST_TESTS_SUPPORT_PROCESSES_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ballast {

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

// The exit code; minus the signal's number if one ended it.
inline int AwaitProcess(pid_t pid) {
  int status = 0;
  if (waitpid(pid, &status, 0) != pid) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
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

// A process whose output and errors are in a folder of its own. It is killed with the object.
class Process {
 public:
  explicit Process(std::vector<std::string> words) : Process(NewDirectory(), std::move(words)) {}
  ~Process() {
    Kill();
    std::filesystem::remove_all(directory_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  bool IsRunning() const {
    siginfo_t info = {};
    return waitid(P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
  }
  void Signal(int signal) { kill(pid_, signal); }
  // Returns when it has ended.
  void Kill() {
    if (pid_ <= 0) return;
    Signal(SIGKILL);
    ExitCode();
  }
  // Waits for its end, and returns what AwaitProcess does. There is no process then.
  int ExitCode() { return AwaitProcess(std::exchange(pid_, -1)); }
  std::string Output() const { return ReadFile(directory_ + "/stdout"); }
  std::string Errors() const { return ReadFile(directory_ + "/stderr"); }

 protected:
  Process(std::string directory, std::vector<std::string> words)
      : directory_(std::move(directory)),
        pid_(StartProcess(words, directory_ + "/stdout", directory_ + "/stderr")) {}
  static std::string NewDirectory() {
    static int made = 0;
    std::string path =
        testing::TempDir() + "process_" + std::to_string(getpid()) + "_" + std::to_string(++made);
    std::filesystem::create_directories(path);
    return path;
  }

  const std::string directory_;

 private:
  pid_t pid_;
};

class Ballastd : public Process {
 public:
  Ballastd(const std::string& program, std::vector<std::string> flags)
      : Ballastd(NewDirectory(), program, std::move(flags)) {}

  // Where it listens. Waits until it does; empty if it ends instead.
  std::string Address() const {
    while (!std::filesystem::exists(PortFile())) {
      if (!IsRunning()) return "";
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const std::string address = ReadFile(PortFile());
    return address.substr(0, address.find('\n'));
  }
  std::string PortFile() const { return directory_ + "/ports"; }

 private:
  Ballastd(const std::string& directory, const std::string& program, std::vector<std::string> flags)
      : Process(directory, Words(directory, program, std::move(flags))) {}
  static std::vector<std::string> Words(const std::string& directory, const std::string& program,
                                        std::vector<std::string> words) {
    words.insert(words.begin(), program);
    words.push_back("--port-file=" + directory + "/ports");
    // Its time and its memory are not the test's, unless that is what is tested.
    if (std::count(words.begin(), words.end(), "--startup-benchmark=true") == 0) {
      words.push_back("--startup-benchmark=false");
    }
    return words;
  }
};

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_PROCESSES_H_
