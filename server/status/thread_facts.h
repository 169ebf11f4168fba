// What the threads of this process are doing, for a bug report.
#ifndef BALLAST_SERVER_STATUS_THREAD_FACTS_H_
#define BALLAST_SERVER_STATUS_THREAD_FACTS_H_

#include <string>
#include <vector>

namespace ballast::server {

struct ThreadFacts {
  int id = 0;  // The kernel's.
  std::string name;
  char state = '?';  // R runs, S sleeps, D waits for a disk, T is stopped.
  double cpu_seconds = 0;
  std::vector<std::string> stack;  // Innermost first; empty: the thread did not answer.
};

// Interrupts every thread for some microseconds, which writes down its own stack. One caller at a
// time; a thread that blocks signals for longer than half a second has no stack.
std::vector<ThreadFacts> ReadThreads();

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_THREAD_FACTS_H_
