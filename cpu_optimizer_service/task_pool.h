// The threads that do the engine's arithmetic: oneTBB's, in an arena of their own.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_TASK_POOL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_TASK_POOL_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"

namespace ballast {

// Thread-safe. Tasks do not throw.
class TaskPool {
 public:
  // `threads` workers; 0: one per core.
  explicit TaskPool(int threads);
  ~TaskPool();  // Waits for all tasks that Start was given.

  int threads() const { return threads_; }

  // Runs `task` on a worker, soon; does not wait.
  void Start(std::function<void()> task);
  // Runs body(0) ... body(count - 1), spread over the workers, and waits for them. May be called
  // from within a task.
  void ForEach(int64_t count, absl::FunctionRef<void(int64_t)> body);

 private:
  struct Impl;
  const int threads_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_TASK_POOL_H_
