// An event that a thread waits for, and that returns whether it was set in time.
#ifndef BALLAST_TESTS_GPU_WORKER_PIPELINE_ONE_SHOT_EVENT_H_
#define BALLAST_TESTS_GPU_WORKER_PIPELINE_ONE_SHOT_EVENT_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace ballast::worker {

class OneShotEvent {
 public:
  bool Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [this] { return open_; });
  }
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_PIPELINE_ONE_SHOT_EVENT_H_
