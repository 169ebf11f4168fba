#include "tests/histories/engine/frozen_threads.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace ballast::histories {
namespace {

constexpr int kMostThreads = 512;
using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kMostTime{60};
constexpr std::chrono::seconds kOneTry{5};

std::atomic<int> frozen = 0;  // A futex.
std::atomic<int> parked_count = 0;
std::atomic<int> resumed_count = 0;
std::atomic<int> parked[kMostThreads];

long Futex(int operation, int value) {  // NOLINT(google-runtime-int): the call's own type.
  return syscall(SYS_futex, reinterpret_cast<int*>(&frozen), operation, value, nullptr, nullptr, 0);
}

[[noreturn]] void Fail(const char* why) {
  (void)!write(STDERR_FILENO, why, std::strlen(why));
  abort();
}

void Park(int /*signal*/) {
  const int error = errno;
  const int index = parked_count.fetch_add(1);
  if (index >= kMostThreads) Fail("more threads than can be frozen\n");
  parked[index] = static_cast<int>(syscall(SYS_gettid));
  while (frozen != 0) Futex(FUTEX_WAIT_PRIVATE, 1);
  resumed_count.fetch_add(1);
  errno = error;
}

struct Threads {
  int ids[kMostThreads];
  int count = 0;

  bool Has(int id) const {
    for (int i = 0; i < count; ++i) {
      if (ids[i] == id) return true;
    }
    return false;
  }
  void Add(int id) {
    if (count == kMostThreads) Fail("more threads than can be frozen\n");
    ids[count++] = id;
  }
};

bool IsParked(int id, int first) {
  for (int i = first; i < parked_count.load(); ++i) {
    if (parked[i] == id) return true;
  }
  return false;
}

// The threads there are, without an allocation.
void List(int directory, Threads& threads) {
  threads.count = 0;
  lseek(directory, 0, SEEK_SET);
  alignas(dirent64) char buffer[4096];
  for (;;) {
    const auto bytes = syscall(SYS_getdents64, directory, buffer, sizeof(buffer));
    if (bytes <= 0) return;
    for (int64_t at = 0; at < bytes;) {
      const auto* const entry = reinterpret_cast<const dirent64*>(buffer + at);
      const int id = atoi(entry->d_name);
      if (id > 0) threads.Add(id);
      at += entry->d_reclen;
    }
  }
}

// False: a thread did not stop in time.
bool Stop(int directory, Clock::time_point deadline) {
  const int first = parked_count;  // Before it are those of an earlier try.
  frozen = 1;
  const int self = static_cast<int>(syscall(SYS_gettid));
  Threads signalled;
  // A thread that is not stopped yet may start another, or end.
  for (bool all = false; !all;) {
    Threads threads;
    List(directory, threads);
    all = true;
    for (int i = 0; i < threads.count; ++i) {
      const int id = threads.ids[i];
      if (id == self) continue;
      if (!signalled.Has(id)) {
        signalled.Add(id);
        syscall(SYS_tgkill, getpid(), id, SIGUSR2);
      }
      all = all && IsParked(id, first);
    }
    if (!all && Clock::now() > deadline) return false;
    if (!all) sched_yield();
  }
  return true;
}

void GoOn() {
  frozen = 0;
  Futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  while (resumed_count != parked_count) sched_yield();
}

}  // namespace

FrozenThreads::FrozenThreads() {
  struct sigaction action = {};
  action.sa_handler = &Park;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR2, &action, nullptr);
  parked_count = resumed_count = 0;
  for (std::atomic<int>& id : parked) id = 0;
  const int directory = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) Fail("/proc/self/task cannot be opened\n");
  const auto deadline = Clock::now() + kMostTime;
  // A thread that ends blocks signals, and may wait for a lock of the C library that a stopped one has.
  while (!Stop(directory, Clock::now() + kOneTry)) {
    GoOn();
    if (Clock::now() > deadline) Fail("a thread does not stop for SIGUSR2\n");
  }
  close(directory);
}

FrozenThreads::~FrozenThreads() { GoOn(); }

}  // namespace ballast::histories
