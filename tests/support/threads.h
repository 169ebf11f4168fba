// What the threads of this process do now.
#ifndef BALLAST_TESTS_SUPPORT_THREADS_H_
#define BALLAST_TESTS_SUPPORT_THREADS_H_

#include <sys/types.h>

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

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_THREADS_H_
