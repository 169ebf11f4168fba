#include "server/ballastd/start_check.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <latch>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ballast::server {
namespace {

// The server starts five threads, two more with TLS. gRPC starts four, some for events and some for
// calls.
constexpr long kOtherThreads = 12;

size_t ThreadsAtStart() {
  // gRPC asks this, and no mask or quota.
  const long processors = sysconf(_SC_NPROCESSORS_ONLN);
  return static_cast<size_t>(kOtherThreads + std::clamp(processors, 2L, 32L) +
                             std::clamp(processors / 2, 2L, 16L));
}

// For the heap, which grows by some MB.
constexpr size_t kMemoryBytes = size_t{32} << 20;

// How many of `count` threads there can be at once.
size_t TryThreads(size_t count) {
  std::latch over(1);
  std::vector<std::thread> threads;
  try {
    threads.reserve(count);
    while (threads.size() < count) threads.emplace_back([&over] { over.wait(); });
  } catch (const std::system_error&) {
  }
  over.count_down();
  for (std::thread& thread : threads) thread.join();
  return threads.size();
}

}  // namespace

absl::Status CheckThatServerCanStart() {
  void* const memory =
      mmap(nullptr, kMemoryBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const size_t wanted = ThreadsAtStart();
  const size_t had = memory == MAP_FAILED ? 0 : TryThreads(wanted);
  if (memory != MAP_FAILED) munmap(memory, kMemoryBytes);
  if (had == wanted) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the system gives this process too little to start: ", had, " of ", wanted,
                   " threads beside ", kMemoryBytes >> 20,
                   " MiB; raise its limits (ulimit -v, ulimit -u, TasksMax, the control group)"));
}

}  // namespace ballast::server
