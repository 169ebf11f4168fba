#include "cpu_optimizer_service/common/system/helper_threads.h"

#include <sys/resource.h>

#include <new>
#include <system_error>
#include <utility>

namespace ballast {

void HelperThreads::Stop() {
  std::vector<std::thread> threads;
  std::deque<std::function<void()>> dropped;  // Destroyed without the lock.
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    threads.swap(threads_);
    dropped.swap(tasks_);
  }
  changed_.NotifyAll();
  // They go before the wait: a task that runs may be waiting for what one of them holds.
  dropped.clear();
  for (std::thread& thread : threads) thread.join();
}

void HelperThreads::Run(std::function<void()> task) {
  {
    MutexLock lock(mutex_);
    if (stopped_) return;
    tasks_.push_back(std::move(task));
    // Threads that are idle are for the tasks that are queued already, also where they have not
    // woken yet. Only a task beyond those needs another thread.
    if (idle_ < tasks_.size() && threads_.size() < most_) {
      try {
        threads_.emplace_back([this] { Help(); });
      } catch (const std::system_error&) {  // The system has no thread: those there are help.
        // Without any thread nobody would run the task, so it is taken back. It is still the last
        // one: the lock is held. Otherwise it waits for one of the threads that there are.
        if (threads_.empty()) {
          tasks_.pop_back();
          throw std::bad_alloc();
        }
      }
    }
  }
  changed_.NotifyOne();
}

void HelperThreads::Help() {
  // Of this thread alone, whatever POSIX says. Not SCHED_IDLE, which may wait for ever.
  if (priority_ == Priority::kLowest) setpriority(PRIO_PROCESS, 0, 19);
  while (true) {
    // Declared here, so that the task and what it holds are gone before the next wait, without the
    // lock.
    std::function<void()> task;
    {
      MutexLock lock(mutex_);
      ++idle_;
      while (!stopped_ && tasks_.empty()) changed_.Wait(mutex_);
      --idle_;
      if (stopped_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace ballast
