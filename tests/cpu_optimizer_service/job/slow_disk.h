// A file system in memory that can be held up: while it is, writing and reading files, or making
// directories, block their threads.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_SLOW_DISK_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_SLOW_DISK_H_

#include <sys/resource.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "tests/histories/memory_file_system.h"

namespace ballast {

// Thread-safe.
class SlowDisk final : public FileSystem {
 public:
  void HoldUp() {
    MutexLock lock(mutex_);
    held_up_ = true;
  }
  void HoldUpDirectories() {
    MutexLock lock(mutex_);
    holds_up_directories_ = true;
  }
  void Release() {
    MutexLock lock(mutex_);
    held_up_ = holds_up_directories_ = false;
    changed_.NotifyAll();
  }
  // The nice values of the threads that have created a plane's file.
  std::set<int> TakeNices() {
    MutexLock lock(mutex_);
    return std::exchange(nices_, {});
  }
  // Returns when `threads` threads are held up.
  void AwaitHeldUp(int threads = 1) {
    MutexLock lock(mutex_);
    while (waiting_ < threads) changed_.Wait(mutex_);
  }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    if (absl::EndsWith(path, ".safetensors")) {
      MutexLock lock(mutex_);
      nices_.insert(getpriority(PRIO_PROCESS, 0));
    }
    Pass(&SlowDisk::held_up_);
    return memory_.Create(path);
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    Pass(&SlowDisk::held_up_);
    return memory_.Open(path);
  }
  bool Exists(const std::string& path) override { return memory_.Exists(path); }
  absl::Status CreateDirectory(const std::string& path) override {
    Pass(&SlowDisk::holds_up_directories_);
    return memory_.CreateDirectory(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return memory_.Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override { return memory_.RemoveAll(path); }
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    return memory_.List(directory);
  }
  std::shared_ptr<const void> TryLock(const std::string& directory) override {
    return memory_.TryLock(directory);
  }

 private:
  void Pass(bool SlowDisk::*held_up) {
    MutexLock lock(mutex_);
    ++waiting_;
    changed_.NotifyAll();
    while (this->*held_up) changed_.Wait(mutex_);
    --waiting_;
  }

  histories::MemoryFileSystem memory_;
  Mutex mutex_;
  CondVar changed_;
  bool held_up_ ABSL_GUARDED_BY(mutex_) = false;
  bool holds_up_directories_ ABSL_GUARDED_BY(mutex_) = false;
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<int> nices_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_SLOW_DISK_H_
