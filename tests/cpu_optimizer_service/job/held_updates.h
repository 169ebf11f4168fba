// Holds provisional updates while they run: their gradients may still be read, and each has a thread
// of its engine.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_HELD_UPDATES_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_HELD_UPDATES_H_

#include <functional>
#include <string_view>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/kept_record.h"

namespace ballast {

// One at a time, which outlives the engines.
class HeldUpdates {
 public:
  HeldUpdates() { store_seam = &seam_; }
  ~HeldUpdates() { store_seam = nullptr; }
  HeldUpdates(const HeldUpdates&) = delete;
  HeldUpdates& operator=(const HeldUpdates&) = delete;

  // From now on none is held.
  void Release() {
    MutexLock lock(mutex_);
    released_ = true;
    changed_.NotifyAll();
  }
  // Returns when so many are held.
  void AwaitHeld(int updates) {
    MutexLock lock(mutex_);
    while (held_ < updates) changed_.Wait(mutex_);
  }

 private:
  void Hold(std::string_view stored) {
    if (stored != "a provisional version of a chunk") return;
    MutexLock lock(mutex_);
    ++held_;
    changed_.NotifyAll();
    while (!released_) changed_.Wait(mutex_);
    --held_;
  }

  std::function<void(const char*)> seam_ = [this](const char* stored) { Hold(stored); };
  Mutex mutex_;
  CondVar changed_;
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_HELD_UPDATES_H_
