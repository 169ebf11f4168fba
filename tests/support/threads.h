// What the threads of this process do now; and a process that gets no more of them.
#ifndef BALLAST_TESTS_SUPPORT_THREADS_H_
#define BALLAST_TESTS_SUPPORT_THREADS_H_

#include <sys/resource.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace ballast {

// Whether it waits. False, too, for a thread that has ended.
inline bool ThreadSleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string line;
  std::getline(file, line);
  // The state follows the name, which is in parentheses.
  const size_t name_end = line.rfind(") ");
  return name_end != std::string::npos && line.at(name_end + 2) == 'S';
}

inline constexpr uid_t kNobody = 65534;

// Root has no such limit, and becomes another user for that, whom its user namespace may lack.
inline bool MayForbidThreads() {
  if (geteuid() != 0) return true;
  const pid_t child = fork();
  if (child == 0) _exit(setuid(kNobody) == 0 ? 0 : 1);
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

// From now on the system gives this process no thread.
inline void ForbidThreads() {
  const rlimit none = {.rlim_cur = 0, .rlim_max = 0};
  if (setrlimit(RLIMIT_NPROC, &none) != 0) std::abort();
  if (geteuid() == 0 && setuid(kNobody) != 0) std::abort();
}

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_THREADS_H_
