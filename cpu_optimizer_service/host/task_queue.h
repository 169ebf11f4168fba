// The tasks of one job, which share the pool's threads fairly with other jobs.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TASK_QUEUE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TASK_QUEUE_H_

#include <functional>
#include <memory>

#include "cpu_optimizer_service/host/task_pool.h"

namespace ballast {

// Tasks begin in the order of Start, at most as many at once as there are threads. However many
// wait, another queue's task waits at most for a slice of some milliseconds: tasks wait in this
// queue, and only the few threads that take them wait in the pool's.
//
// Thread-safe. May be destroyed while tasks wait; they still run. The pool outlives them.
class TaskQueue {
 public:
  explicit TaskQueue(TaskPool& pool);

  // Runs `task`, which must not throw, on a worker, of `node` if given, soon; does not wait.
  void Start(std::function<void()> task, int node = TaskPool::kAnyNode);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TASK_QUEUE_H_
