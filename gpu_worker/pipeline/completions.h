// A thread that waits for work of the device and then makes the requested calls.
//
//   completions.After(copies, [](const absl::Status& status) { ... the copy is done ... });
//
// Calls are made one at a time, in the order of the requests.
//
// Thread-safe. The destructor makes all outstanding calls; on a lost device, with its error.
#ifndef BALLAST_GPU_WORKER_PIPELINE_COMPLETIONS_H_
#define BALLAST_GPU_WORKER_PIPELINE_COMPLETIONS_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

class Completions {
 public:
  using Then = std::function<void(const absl::Status& status)>;

  explicit Completions(Device& device);
  ~Completions();

  // Once the present work of `stream` is done. After an error `then` is never called.
  absl::Status After(DeviceStream& stream, Then then);
  // After all calls requested so far.
  void AfterThose(Then then);

  // Waits until no call is outstanding.
  void WaitIdle();

 private:
  struct Owed {
    std::unique_ptr<DeviceEvent> event;  // Null: nothing to wait for.
    Then then;
  };

  absl::StatusOr<std::unique_ptr<DeviceEvent>> TakeEvent();
  void Enqueue(Owed owed);
  void Run();

  Device& device_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Owed> queue_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<DeviceEvent>> events_ ABSL_GUARDED_BY(mutex_);  // To be used again.
  std::thread thread_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_COMPLETIONS_H_
