#include "server/train/seal_watch.h"

#include <chrono>

#include "cpu_optimizer_service/common/system/memory_guard.h"

namespace ballast::server {

SealWatch::SealWatch(Engine& engine, double deadline_seconds, double reminder_seconds)
    : engine_(engine),
      deadline_seconds_(deadline_seconds),
      reminder_seconds_(reminder_seconds),
      thread_([this] { Run(); }) {}

SealWatch::~SealWatch() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
  }
  stopped_changed_.NotifyAll();
  thread_.join();
}

void SealWatch::Run() {
  using Clock = std::chrono::steady_clock;
  const auto reminder =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(reminder_seconds_));
  while (true) {
    {
      MutexLock lock(mutex_);
      const Clock::time_point next = Clock::now() + reminder;
      while (!stopped_ && stopped_changed_.WaitUntil(mutex_, next)) continue;
      if (stopped_) return;
    }
    // Without the lock: the calls reach the streams' outboxes.
    (void)RunsInMemory([this] {
      for (const std::shared_ptr<Job>& job : engine_.ListJobs()) {
        const std::optional<double> seconds = job->SecondsSinceFirstSeal();
        if (seconds && *seconds >= deadline_seconds_) job->TellWaiting();
      }
    });
  }
}

}  // namespace ballast::server
