#include "server/access/file_watch.h"

#include <sys/stat.h>

#include <chrono>
#include <cstdint>
#include <utility>

#include "cpu_optimizer_service/common/system/memory_guard.h"

namespace ballast::server {
namespace {

constexpr std::chrono::seconds kLookEvery(1);

}  // namespace

FileWatch::FileWatch(std::vector<std::string> paths, std::function<void()> changed)
    : paths_(std::move(paths)),
      changed_(std::move(changed)),
      seen_(Look()),
      thread_([this] { Run(); }) {}

FileWatch::~FileWatch() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
  }
  stopping_.NotifyAll();
  thread_.join();
}

std::vector<int64_t> FileWatch::Look() const {
  std::vector<int64_t> marks;
  for (const std::string& path : paths_) {
    struct stat found = {};
    // Of one that is gone, zeros.
    static_cast<void>(stat(path.c_str(), &found));
    for (const int64_t mark :
         {static_cast<int64_t>(found.st_ino), static_cast<int64_t>(found.st_size),
          static_cast<int64_t>(found.st_mode), static_cast<int64_t>(found.st_mtim.tv_sec),
          static_cast<int64_t>(found.st_mtim.tv_nsec), static_cast<int64_t>(found.st_ctim.tv_sec),
          static_cast<int64_t>(found.st_ctim.tv_nsec)}) {
      marks.push_back(mark);
    }
  }
  return marks;
}

void FileWatch::Run() {
  while (true) {
    {
      MutexLock lock(mutex_);
      const auto next = std::chrono::steady_clock::now() + kLookEvery;
      while (!stopped_ && stopping_.WaitUntil(mutex_, next)) continue;
      if (stopped_) return;
    }
    (void)RunsInMemory([this] {  // Without it, the next second.
      std::vector<int64_t> marks = Look();
      if (marks == seen_) return;
      changed_();
      seen_ = std::move(marks);
    });
  }
}

}  // namespace ballast::server
