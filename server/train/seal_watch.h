// Reminds sealed ranks of the ranks that they wait for, repeatedly, once a step's seal deadline has
// passed.
#ifndef BALLAST_SERVER_TRAIN_SEAL_WATCH_H_
#define BALLAST_SERVER_TRAIN_SEAL_WATCH_H_

#include <thread>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"

namespace ballast::server {

class SealWatch {
 public:
  // Starts watching, from a thread of its own, until destroyed. The engine outlives it.
  SealWatch(Engine& engine, double deadline_seconds, double reminder_seconds);
  ~SealWatch();

 private:
  void Run();

  Engine& engine_;
  const double deadline_seconds_;
  const double reminder_seconds_;
  Mutex mutex_;
  CondVar stopped_changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_TRAIN_SEAL_WATCH_H_
