#include "server/holder/holder.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu_optimizer_service/common/system/steady_time.h"
#include "server/holder/child_start.h"
#include "server/holder/holder_table.h"
#include "server/holder/log_line.h"
#include "server/holder/trial.h"

namespace ballast::server {
namespace {

// A child that served for so long had started well: its death is the first of a row.
constexpr double kServedSeconds = 5;
// Of a child that is about to be replaced.
constexpr double kFarewellSeconds = 0.5;
// Before the second start in a row, doubled from then on.
constexpr int kPauseMs = 50;
constexpr int kLongestPauseMs = 5000;

// What a SIGHUP means that does not say it itself.
enum class Hangup { kDrain, kUpgrade, kIgnored };

Hangup WhatAHangupMeans() {
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler == SIG_IGN) return Hangup::kIgnored;  // nohup.
  // It can be opened only by a process that has a terminal.
  const int terminal = open("/dev/tty", O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (terminal < 0) return Hangup::kUpgrade;
  close(terminal);
  return Hangup::kDrain;
}

bool IsThisProgram(const char* path) {
  struct stat there = {};
  struct stat own = {};
  return stat(path, &there) == 0 && stat("/proc/self/exe", &own) == 0 &&
         there.st_dev == own.st_dev && there.st_ino == own.st_ino;
}

bool IsOfAJob(const HeldFile& file) {
  // kJobUidCharacters, which is in a folder that this one may not include.
  return file.descriptor != 0 && std::strchr(file.name, '/') == file.name + 32;
}

class Holder {
 public:
  Holder(char** argv, const HolderOptions& options) : argv_(argv), options_(options) {}

  // False: errno says why not.
  bool Prepare();
  int Run();

 private:
  bool FindProgram();
  bool StartChild();
  // Until the child has ended; its status as of waitpid.
  int MillisecondsToWait() const;
  int AwaitEnd();
  void ReadSignals();
  void PassOn(int signal);
  void ReadMessages();
  void Keep(const HolderMessage& message, int descriptor);
  void Drop(const HolderMessage& message);
  void PauseAfter(int deaths);
  void Pause(int milliseconds);
  // The longest pause.
  // With any number of deaths, as tests and benchmarks have it that kill on purpose, it stays
  // short.
  int RetryMs() const { return options_.most_deaths == 0 ? kPauseMs : kLongestPauseMs; }
  bool HoldsJobs() const;

  void Ready(const HolderMessage& message);
  // Of what upgrade_ says.
  void TakeUpUpgrade();
  void TryProgram();
  void ReplaceChild();
  void EndTrial();
  void EndUpgrade(const char* why_not);
  void GoBack();

  char** const argv_;
  const HolderOptions options_;
  std::vector<char*> trial_argv_;
  char path_[PATH_MAX] = {};  // Of the program, as it was started.
  int program_ = -1;          // Of the child.
  int program_before_ = -1;   // While upgrade_ is kStarting.
  HolderTable* table_ = nullptr;
  int table_file_ = -1;
  int signals_ = -1;
  int socket_ = -1;  // To the child; -1: it has closed its end.
  pid_t child_ = 0;
  bool child_ended_ = false;
  Hangup hangup_ = Hangup::kDrain;
  enum class Upgrade { kNone, kAsked, kReplacing, kStarting };
  Upgrade upgrade_ = Upgrade::kNone;
  bool asked_meanwhile_ = false;  // For another one, while one is under way.
  Trial trial_;
  int stopping_ = 0;       // The last signal that was forwarded.
  double ready_at_ = 0;    // 0: the child is not ready.
  double replace_at_ = 0;  // When the child that is replaced has had its time; 0: none is.
};

bool Holder::Prepare() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {  // For many jobs, each of some descriptors.
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  table_file_ = memfd_create(kHolderFile, MFD_CLOEXEC);
  if (table_file_ < 0 || ftruncate(table_file_, sizeof(HolderTable)) != 0) return false;
  void* const table =
      mmap(nullptr, sizeof(HolderTable), PROT_READ | PROT_WRITE, MAP_SHARED, table_file_, 0);
  if (table == MAP_FAILED) return false;
  table_ = static_cast<HolderTable*>(table);
  table_->protocol = kHolderProtocol;
  // What is printed may have no reader any more.
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  hangup_ = WhatAHangupMeans();
  // Read from a descriptor, so that no handler runs between two statements. A child inherits the
  // block, also through exec: what it is sent before it waits for signals stays pending.
  sigset_t all;
  sigemptyset(&all);
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) sigaddset(&all, number);
  if (sigprocmask(SIG_BLOCK, &all, nullptr) != 0) return false;
  signals_ = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
  return signals_ >= 0 && FindProgram();
}

bool Holder::FindProgram() {
  // Made now, because later the holder allocates nothing.
  for (char** word = argv_; *word != nullptr; ++word) trial_argv_.push_back(*word);
  static char argument[sizeof(kTrialArgument)];
  std::memcpy(argument, kTrialArgument, sizeof(argument));
  trial_argv_.push_back(argument);
  trial_argv_.push_back(nullptr);
  // As it was called: a link may lead to another file later.
  const auto* const called = reinterpret_cast<const char*>(getauxval(AT_EXECFN));
  if (called != nullptr && std::strlen(called) < sizeof(path_) && IsThisProgram(called)) {
    std::strcpy(path_, called);
  } else if (readlink("/proc/self/exe", path_, sizeof(path_) - 1) < 0) {
    return false;
  }
  // After a death this file is started again, whatever lies at its path: only an upgrade changes
  // it.
  program_ = open("/proc/self/exe", O_PATH | O_CLOEXEC);
  return program_ >= 0;
}

bool Holder::StartChild() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return false;
  ready_at_ = 0;
  child_ended_ = false;
  table_->is_upgrade = upgrade_ == Upgrade::kStarting;
  table_->stops = 0;
  child_ = StartHeldChild({.program = program_,
                           .argv = argv_,
                           .table = table_,
                           .table_file = table_file_,
                           .socket = ends[1]});
  table_->child = child_;
  // With this copy open the end of the child's would never show.
  close(ends[1]);
  if (child_ <= 0) {  // The next attempt makes another pair.
    close(ends[0]);
    return false;
  }
  socket_ = ends[0];
  return true;
}

void Holder::Keep(const HolderMessage& message, int descriptor) {
  for (int i = 0; i < kMostHeld; ++i) {
    HeldFile& file = table_->files[i];
    if (file.descriptor != 0) continue;
    std::memcpy(file.name, message.name, sizeof(file.name));
    file.descriptor = descriptor;
    return;
  }
  close(descriptor);  // The child counts, so this does not happen.
}

void Holder::Drop(const HolderMessage& message) {
  for (int i = 0; i < kMostHeld; ++i) {
    HeldFile& file = table_->files[i];
    if (file.descriptor == 0 || std::strncmp(file.name, message.name, sizeof(file.name)) != 0) {
      continue;
    }
    close(file.descriptor);
    file.descriptor = 0;
    return;
  }
}

void Holder::ReadMessages() {
  for (;;) {
    HolderMessage message = {};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    iovec piece = {.iov_base = &message, .iov_len = sizeof(message)};
    msghdr header = {};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t bytes = recvmsg(socket_, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return;
    // The child has closed its end. Were this one kept, poll would not wait any more.
    if (bytes == 0) {
      close(socket_);
      socket_ = -1;
      return;
    }
    // Where this process may have no more descriptors, the message comes without its own.
    int descriptor = -1;
    const cmsghdr* const part = CMSG_FIRSTHDR(&header);
    if (part != nullptr && part->cmsg_type == SCM_RIGHTS) {
      std::memcpy(&descriptor, CMSG_DATA(part), sizeof(descriptor));
    }
    message.name[kHeldNameBytes - 1] = '\0';
    switch (message.kind) {
      case HolderMessage::Kind::kKeep:
        // Not 0, which marks a free place in the table.
        if (descriptor > 0) {
          Keep(message, descriptor);
        } else {
          LogLine(kErrorPriority,
                  "%s is not held, and would be lost with the service's process: "
                  "there is no descriptor for it (see ulimit -n); save the jobs",
                  message.name);
        }
        break;
      case HolderMessage::Kind::kDrop:
        Drop(message);
        break;
      case HolderMessage::Kind::kReady:
        Ready(message);
        break;
      case HolderMessage::Kind::kStopRefused:
        stopping_ = 0;
        break;
      case HolderMessage::Kind::kSaidFarewell:
        ReplaceChild();
        break;
      case HolderMessage::Kind::kCanTakeOver:
        break;  // Of trials, on sockets of their own.
    }
  }
}

void Holder::Ready(const HolderMessage& message) {
  ready_at_ = SteadySeconds();
  table_->state_format = message.state_format;
  if (upgrade_ == Upgrade::kStarting) EndUpgrade(nullptr);
}

void Holder::ReadSignals() {
  signalfd_siginfo info = {};
  while (read(signals_, &info, sizeof(info)) == sizeof(info)) {
    const int number = static_cast<int>(info.ssi_signo);
    // Of the child or of a trial, and several may have become one: AwaitEnd asks for both.
    if (number == SIGCHLD) {
      child_ended_ = true;
      continue;
    }
    if (number == SIGHUP) {
      // Only sigqueue gives a signal this code: a terminal and `kill` do not.
      const bool is_asked = info.ssi_code == SI_QUEUE && info.ssi_int == kUpgradeAsked;
      const bool upgrades = is_asked || hangup_ == Hangup::kUpgrade;
      // The one under way may have opened a program that has been replaced since.
      if (upgrades && upgrade_ != Upgrade::kNone) asked_meanwhile_ = true;
      if (upgrades && upgrade_ == Upgrade::kNone) TakeUpUpgrade();
      if (upgrades || hangup_ == Hangup::kIgnored) continue;
    }
    // The child may have refused the stop before this one: forgetting that must not forget this.
    if (socket_ >= 0) ReadMessages();
    stopping_ = number;
    // None is there in a pause, and kill takes 0 and -1 for many processes.
    if (child_ > 0) PassOn(number);
  }
}

void Holder::PassOn(int signal) {
  std::atomic_ref<uint32_t>(table_->stops).fetch_add(1, std::memory_order_release);
  kill(child_, signal);
}

int Holder::MillisecondsToWait() const {
  if (trial_.running()) return trial_.milliseconds_left();
  if (replace_at_ == 0) return -1;
  return std::max(0, static_cast<int>(1e3 * (replace_at_ - SteadySeconds())) + 1);
}

int Holder::AwaitEnd() {
  for (;;) {
    if (trial_.Ended()) EndTrial();
    // Only beside a child that serves: it has said in which format it keeps jobs, which a trial
    // looks at.
    if (upgrade_ == Upgrade::kAsked && ready_at_ > 0 && !trial_.running()) TryProgram();
    pollfd waits[] = {{.fd = signals_, .events = POLLIN, .revents = 0},
                      {.fd = socket_, .events = POLLIN, .revents = 0},
                      {.fd = trial_.output(), .events = POLLIN, .revents = 0}};
    // It only waits: nothing that is read below blocks, so what it returns does not matter. A
    // descriptor of -1 is passed over.
    poll(waits, 3, MillisecondsToWait());
    if (socket_ >= 0) ReadMessages();
    if (replace_at_ > 0 && SteadySeconds() >= replace_at_) ReplaceChild();
    ReadSignals();
    if (!child_ended_) continue;
    child_ended_ = false;
    int status = 0;
    // The signal may have been of a trial, or the child was only stopped.
    if (waitpid(child_, &status, WNOHANG) != child_) continue;
    child_ = 0;
    // All that it had handed over before it died.
    if (socket_ >= 0) ReadMessages();
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
    return status;
  }
}

// ---------------------------------------------------------------- an upgrade

void Holder::TakeUpUpgrade() {
  upgrade_ = Upgrade::kAsked;
  asked_meanwhile_ = false;
  std::atomic_ref<uint32_t>(table_->upgrades).fetch_add(1, std::memory_order_release);
}

void Holder::TryProgram() {
  if (stopping_ != 0) return EndUpgrade("it is stopping");
  const ChildStart start = {.argv = trial_argv_.data(), .table = table_, .table_file = table_file_};
  if (!trial_.Start(path_, start)) EndUpgrade(trial_.why_not());
}

void Holder::EndTrial() {
  const char* const why_not = stopping_ != 0 ? "it is stopping" : trial_.why_not();
  if (why_not != nullptr) {
    trial_.GiveUp();
    return EndUpgrade(why_not);
  }
  // Kept until the new one serves: GoBack may need it.
  program_before_ = program_;
  program_ = trial_.TakeProgram();
  // At whatever instant: what it leaves is taken over as after a death.
  upgrade_ = Upgrade::kReplacing;
  // It tells its clients first, so that they know this from a death. It need not: what does not
  // answer is replaced all the same.
  replace_at_ = SteadySeconds() + kFarewellSeconds;
  kill(child_, FarewellSignal());
}

void Holder::ReplaceChild() {
  replace_at_ = 0;
  if (upgrade_ == Upgrade::kReplacing && child_ > 0) kill(child_, SIGKILL);
}

// Null: the new program serves.
void Holder::EndUpgrade(const char* why_not) {
  upgrade_ = Upgrade::kNone;
  if (program_before_ >= 0) close(program_before_);
  program_before_ = -1;
  table_->has_upgraded = why_not == nullptr;
  std::snprintf(table_->why_not, sizeof(table_->why_not), "%s", why_not == nullptr ? "" : why_not);
  if (why_not != nullptr) {
    LogLine(kErrorPriority, "not upgraded, and the service goes on as it was: %s", why_not);
  }
  // Who asked returns now, and finds that line.
  std::atomic_ref<uint32_t>(table_->upgrades).fetch_add(1, std::memory_order_release);
  if (asked_meanwhile_) TakeUpUpgrade();
}

void Holder::GoBack() {
  close(program_);
  program_ = program_before_;
  program_before_ = -1;
  EndUpgrade("the program on disk ended before it served, and the one before is started again");
}

bool Holder::HoldsJobs() const {
  return options_.holds_jobs && std::any_of(table_->files, table_->files + kMostHeld, IsOfAJob);
}

void Holder::PauseAfter(int deaths) {
  if (deaths < 2) return;
  // The inner bound only keeps the shift from overflowing.
  Pause(std::min(kPauseMs << std::min(deaths - 2, 10), RetryMs()));
}

void Holder::Pause(int milliseconds) {
  const double until = SteadySeconds() + 1e-3 * milliseconds;
  // A signal ends it: the child that is started then gets it.
  while (stopping_ == 0 && SteadySeconds() < until) {
    pollfd wait = {.fd = signals_, .events = POLLIN, .revents = 0};
    poll(&wait, 1, std::max(1, static_cast<int>(1e3 * (until - SteadySeconds()))));
    ReadSignals();
  }
}

int Holder::Run() {
  for (int deaths = 0, failures = 0;;) {
    if (!StartChild()) {
      LogLine(kErrorPriority, "cannot start the service: %s", std::strerror(errno));
      if (!HoldsJobs()) return 1;
      PauseAfter(++failures);
      continue;
    }
    // The signal came while there was no child, or the child before was killed while it stopped.
    if (stopping_ != 0) PassOn(stopping_);
    const int status = AwaitEnd();
    const bool by_itself = WIFEXITED(status);
    // One that was killed may not have saved its jobs: it is started again, and gets the signal
    // again. One that gives up a save ends by itself, with a code.
    if (by_itself && stopping_ != 0) return WEXITSTATUS(status);
    // However it ended: by that SIGKILL, or otherwise just before.
    if (upgrade_ == Upgrade::kReplacing) {  // No death.
      replace_at_ = 0;
      upgrade_ = Upgrade::kStarting;
      deaths = 0;
      continue;
    }
    if (upgrade_ == Upgrade::kStarting) {
      GoBack();
      continue;
    }
    // Nothing is lost with it, and who started the service should get the code of a wrong start.
    if (by_itself && !HoldsJobs()) return WEXITSTATUS(status);
    if (by_itself && ready_at_ == 0) {  // No full disk, say, is worth the end of jobs.
      LogLine(kErrorPriority,
              "the service could not start (code %d, for the reason above); what it "
              "had is held, and it is tried again until it can",
              WEXITSTATUS(status));
      PauseAfter(++failures);
      continue;
    }
    failures = 0;
    const bool served = ready_at_ > 0 && SteadySeconds() - ready_at_ >= kServedSeconds;
    deaths = served ? 1 : deaths + 1;
    ++table_->deaths;
    const char* const how = by_itself ? "with code" : "by signal";
    const int number = by_itself ? WEXITSTATUS(status) : WTERMSIG(status);
    if (options_.most_deaths > 0 && deaths >= options_.most_deaths) {
      LogLine(kErrorPriority,
              "the service ended %s %d, the %dth time in a row; it is not started "
              "again%s",
              how, number, deaths,
              options_.holds_jobs ? ", and what it held is lost: go on from the last checkpoint"
                                  : "; its jobs stay in the directory of --state-dir");
      return by_itself ? number : 128 + number;
    }
    LogLine(kErrorPriority,
            "the service ended %s %d; it is started again over the memory that it "
            "left",
            how, number);
    PauseAfter(deaths);
  }
}

}  // namespace

bool IsHeld() { return std::getenv(kHolderVariable) != nullptr; }

int RunHolder(char** argv, const HolderOptions& options) {
  Holder holder(argv, options);
  if (holder.Prepare()) return holder.Run();
  LogLine(kErrorPriority, "cannot hold memory: %s; --holder=none does without",
          std::strerror(errno));
  return 1;
}

}  // namespace ballast::server
