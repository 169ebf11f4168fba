#include "server/status/thread_facts.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <mutex>
#include <thread>

#include "absl/debugging/symbolize.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/system/visit_names.h"

namespace ballast::server {
namespace {

constexpr int kMostFrames = 48;
constexpr std::chrono::milliseconds kPatience{500};

// Where the thread that is asked writes.
struct Answer {
  std::atomic<int> thread = 0;  // Who is to answer; negative: has.
  void* frames[kMostFrames];
  int depth = 0;
};
// Never freed: who is late still writes there.
std::atomic<Answer*> current_answer = nullptr;

// SIGRTMIN itself ends a drain (ballastd_main.cc).
int StackSignal() { return SIGRTMIN + 1; }

// Takes no lock and no memory: glibc 2.35 and later find the tables for unwinding without either.
void WriteStack(int) {
  const int error = errno;
  Answer& answer = *current_answer.load(std::memory_order_acquire);
  int self = static_cast<int>(syscall(SYS_gettid));
  if (answer.thread.load(std::memory_order_acquire) == self) {
    answer.depth = backtrace(answer.frames, kMostFrames);
    answer.thread.compare_exchange_strong(self, -self, std::memory_order_release);
  }
  errno = error;
}

std::vector<std::string> StackOf(int thread) {
  if (current_answer == nullptr) current_answer = new Answer;
  Answer& answer = *current_answer;
  // Before the signal: a thread that finds another number there writes nothing.
  answer.thread = thread;
  std::vector<std::string> stack;
  // By the kernel's number, which is what /proc tells of a thread. It may have ended since then.
  if (syscall(SYS_tgkill, getpid(), thread, StackSignal()) != 0) return stack;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (answer.thread.load(std::memory_order_acquire) != -thread) {
    if (std::chrono::steady_clock::now() > end) {
      current_answer = new Answer;  // It may be answering just now.
      return stack;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  constexpr int kOfTheSignal = 2;  // The handler, and the kernel's way back from it.
  for (int i = kOfTheSignal; i < answer.depth; ++i) {
    char name[512] = "?";
    // An address of a return is one behind its call.
    (void)absl::Symbolize(static_cast<char*>(answer.frames[i]) - 1, name, sizeof(name));
    stack.push_back(absl::StrCat(absl::Hex(answer.frames[i]), " ", name));
  }
  return stack;
}

ThreadFacts FactsOf(int thread) {
  ThreadFacts facts = {.id = thread};
  std::ifstream file(absl::StrCat("/proc/self/task/", thread, "/stat"));
  const std::string stat(std::istreambuf_iterator<char>(file), {});
  const size_t begin = stat.find('(');
  const size_t end = stat.rfind(')');
  if (begin == std::string::npos || end == std::string::npos) return facts;
  facts.name = stat.substr(begin + 1, end - begin - 1);
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(end + 1), ' ', absl::SkipEmpty());
  // The first one here is field 3 of proc(5), so that 11 and 12 are its 14 and 15, in ticks.
  if (fields.size() < 13) return facts;
  double user = 0;
  double system = 0;
  (void)(absl::SimpleAtod(fields[11], &user) && absl::SimpleAtod(fields[12], &system));
  facts.state = fields[0][0];
  facts.cpu_seconds = (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return facts;
}

}  // namespace

std::vector<ThreadFacts> ReadThreads() {
  static std::mutex* const one_caller = new std::mutex;
  const std::lock_guard lock(*one_caller);
  void* frame = nullptr;
  (void)backtrace(&frame, 1);  // Loads what unwinding needs, which a signal must not.
  struct sigaction action = {};
  action.sa_handler = WriteStack;
  // Reads and writes go on by themselves; poll and the like end with EINTR all the same
  // (signal(7)).
  action.sa_flags = SA_RESTART;
  sigfillset(&action.sa_mask);
  sigaction(StackSignal(), &action, nullptr);
  std::vector<ThreadFacts> threads;
  (void)VisitNames(AT_FDCWD, "/proc/self/task", [&](const char* name, int) {
    int thread = 0;
    if (!absl::SimpleAtoi(name, &thread)) return;
    ThreadFacts& facts = threads.emplace_back(FactsOf(thread));
    facts.stack = StackOf(thread);
  });
  return threads;
}

}  // namespace ballast::server
