#include "server/holder/child_start.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "server/holder/log_line.h"

namespace ballast::server {
namespace {

[[noreturn]] void Become(const ChildStart& start, pid_t holder) {
  // Dies with its parent, and with it goes what was held.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The holder may have died before that call, which then sends nothing.
  if (getppid() != holder) _exit(1);
  // A terminal's signals reach the holder alone, which passes them on once.
  setpgid(0, 0);
  // The program finds them under these numbers, which are in the table.
  for (const HeldFile& file : start.table->files) {
    if (file.descriptor != 0) fcntl(file.descriptor, F_SETFD, 0);
  }
  if (start.output >= 0) {
    dup2(start.output, STDOUT_FILENO);
    dup2(start.output, STDERR_FILENO);
  }
  fcntl(start.table_file, F_SETFD, 0);
  fcntl(start.socket, F_SETFD, 0);
  fcntl(start.program, F_SETFD, 0);  // What interprets a script opens it again.
  // This may allocate: the holder has one thread, so no lock was held when it forked.
  char numbers[32];
  std::snprintf(numbers, sizeof(numbers), "%d,%d", start.socket, start.table_file);
  setenv(kHolderVariable, numbers, 1);
  static char title[] = "ballastd: service";  // For ps, which shows the flags behind it.
  start.argv[0] = title;
  fexecve(start.program, start.argv, environ);
  LogLine(kErrorPriority, "cannot start the service: %s", std::strerror(errno));
  _exit(1);
}

}  // namespace

pid_t StartHeldChild(const ChildStart& start) {
  // Asked before fork: the child's getppid may already be another process.
  const pid_t holder = getpid();
  const pid_t child = fork();
  if (child == 0) Become(start, holder);
  return child;
}

}  // namespace ballast::server
