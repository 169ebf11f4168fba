#include "server/holder/trial.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "cpu_optimizer_service/common/system/steady_time.h"

namespace ballast::server {
namespace {

// It reads a few files. A disk of the network may take its time.
constexpr double kLongestSeconds = 60;

void Close(int& descriptor) {
  if (descriptor >= 0) close(descriptor);
  descriptor = -1;
}

}  // namespace

bool Trial::Start(const char* path, ChildStart start) {
  has_passed_ = false;
  has_line_ = false;
  said_bytes_ = 0;
  said_[0] = '\0';
  int ends[2] = {-1, -1};
  int pipe_ends[2] = {-1, -1};
  // Opened once, so that TakeProgram gives the file that was tried, whatever lies at the path then.
  program_ = open(path, O_PATH | O_CLOEXEC);
  const bool made = program_ >= 0 &&
                    socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0 &&
                    pipe2(pipe_ends, O_CLOEXEC | O_NONBLOCK) == 0;
  if (made) {
    start.program = program_;
    start.socket = ends[1];
    start.output = pipe_ends[1];
    pid_ = StartHeldChild(start);
  }
  const int error = errno;
  // With these copies open, output and socket would not end with the program.
  Close(ends[1]);
  Close(pipe_ends[1]);
  socket_ = ends[0];
  output_ = pipe_ends[0];
  if (made && pid_ > 0) {
    deadline_ = SteadySeconds() + kLongestSeconds;
    return true;
  }
  pid_ = 0;
  std::snprintf(said_, sizeof(said_), "%s: %s", path, std::strerror(error));
  GiveUp();
  return false;
}

int Trial::milliseconds_left() const {
  // Rounded up, so that poll does not return again and again just before the deadline.
  return std::max(0, static_cast<int>(1e3 * (deadline_ - SteadySeconds())) + 1);
}

void Trial::Read() {
  // Only the first line that is not empty is kept. The rest is read, too: a full pipe would stop
  // the program.
  char some[256];
  ssize_t bytes = 0;
  while ((bytes = read(output_, some, sizeof(some))) > 0) {
    for (ssize_t i = 0; i < bytes && !has_line_; ++i) {
      has_line_ = some[i] == '\n' && said_bytes_ > 0;
      if (some[i] != '\n' && said_bytes_ + 1 < kReasonBytes) said_[said_bytes_++] = some[i];
    }
  }
  if (bytes == 0) Close(output_);  // No process writes there any more.
}

// What it has said itself says more.
void Trial::SayEnd(const char* how, int number) {
  said_[said_bytes_] = '\0';
  // The line that the holder or who asked prints begins so already.
  constexpr char kItself[] = "ballastd: ";
  if (std::strncmp(said_, kItself, sizeof(kItself) - 1) == 0) {
    std::memmove(said_, said_ + sizeof(kItself) - 1, sizeof(said_) - sizeof(kItself) + 1);
  }
  if (said_[0] != '\0') return;
  std::snprintf(said_, sizeof(said_), "the program on disk ended %s %d when it was tried", how,
                number);
}

bool Trial::Ended() {
  if (!running()) return false;
  if (output_ >= 0) Read();
  int status = 0;
  const bool is_late = SteadySeconds() >= deadline_;
  if (is_late) kill(pid_, SIGKILL);
  // After SIGKILL its end comes without its help, and is waited for.
  if (waitpid(pid_, &status, is_late ? 0 : WNOHANG) != pid_) return false;
  pid_ = 0;
  // What it wrote between the look above and its end.
  if (output_ >= 0) Read();
  HolderMessage message = {};
  const ssize_t bytes = recv(socket_, &message, sizeof(message), MSG_DONTWAIT);
  // An exit code of 0 alone proves nothing, for any program may end so; nor does the message, if
  // the program failed after it.
  has_passed_ = !is_late && bytes == sizeof(message) &&
                message.kind == HolderMessage::Kind::kCanTakeOver && WIFEXITED(status) &&
                WEXITSTATUS(status) == 0;
  if (is_late) {
    std::snprintf(said_, sizeof(said_), "the program on disk did not end when it was tried");
  } else if (WIFEXITED(status)) {
    SayEnd("with code", WEXITSTATUS(status));
  } else {
    SayEnd("by signal", WTERMSIG(status));
  }
  Close(socket_);
  Close(output_);
  if (!has_passed_) Close(program_);
  return true;
}

int Trial::TakeProgram() {
  const int program = program_;
  program_ = -1;
  return program;
}

void Trial::GiveUp() {
  if (running()) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  Close(socket_);
  Close(output_);
  Close(program_);
}

}  // namespace ballast::server
