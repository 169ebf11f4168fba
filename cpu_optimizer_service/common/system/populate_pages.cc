#include "cpu_optimizer_service/common/system/populate_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/limits/processors.h"
#include "cpu_optimizer_service/common/rounding.h"

// Linux 5.14; older headers do not have it.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ballast {
namespace {

constexpr size_t kMostThreads = 8;  // By then the memory is the limit.

}  // namespace

int PopulatePages(std::byte* memory, size_t bytes, size_t piece_bytes,
                  const std::function<void(size_t)>& made) {
  std::atomic<size_t> next = 0;  // First byte that no thread has taken.
  std::atomic<int> failed = 0;
  const auto work = [&] {
    while (failed == 0) {
      // Threads take pieces as they come to them: one that shares its processor takes fewer.
      const size_t begin = next.fetch_add(piece_bytes);
      if (begin >= bytes) return;
      const size_t piece = std::min(piece_bytes, bytes - begin);
      int result = 0;
      do {
        result = madvise(memory + begin, piece, MADV_POPULATE_WRITE);
      } while (result != 0 && errno == EINTR);
      // One of several errors is enough. The other threads see it before their next piece.
      if (result != 0) failed = errno;
      if (result == 0 && made) made(piece);
    }
  };
  const size_t pieces = DivideUp(bytes, piece_bytes);
  const size_t threads =
      std::min<size_t>({pieces, kMostThreads, static_cast<size_t>(UsableProcessorCount())});
  std::vector<std::thread> others;
  // The calling thread is the first of them.
  try {
    for (size_t i = 1; i < threads; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {  // The system has no more threads: those there are do it.
  }
  work();
  for (std::thread& thread : others) thread.join();
  return failed;
}

}  // namespace ballast
