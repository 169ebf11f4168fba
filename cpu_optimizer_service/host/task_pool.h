// The threads for the engine's arithmetic: oneTBB's, with an arena for each NUMA node.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TASK_POOL_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TASK_POOL_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"
#include "cpu_optimizer_service/host/topology.h"

namespace ballast {

// Thread-safe. Tasks do not throw.
//
// Every task gets its turn soon. Tasks begin in the order of Start. A loop over many indices gives
// up its threads after a slice of some milliseconds, and queues again behind newer work.
//
// If there are several nodes, each thread is bound to one of them. Index i of `count` belongs to
// node NodeOf(i, count), in proportion to the nodes' threads. So memory that the same indices touch
// and work on is near its threads.
class TaskPool {
 public:
  static constexpr int kAnyNode = -1;
  // A worker works this long for one loop or queue (task_queue.h) before others have their turn: a
  // few chunks.
  static constexpr std::chrono::milliseconds kSlice{2};

  // `threads` workers; 0: one for each usable processor.
  explicit TaskPool(int threads, const Topology& topology = MachineTopology());
  ~TaskPool();  // Waits for all started tasks.

  int threads() const { return threads_; }
  struct Use {
    int64_t tasks = 0;        // Queued or running now.
    double busy_seconds = 0;  // The sum over all threads, for ended tasks.
  };
  Use use() const;
  int nodes() const;
  int threads_of(int node) const;
  int NodeOf(int64_t index, int64_t count) const;

  // Runs `task`, which must not throw, on a worker, of `node` if given, soon; does not wait. If the
  // system gives the pool no threads, the process ends with one line.
  void Start(std::function<void()> task, int node = kAnyNode);
  // Runs body(0) ... body(count - 1) on the workers, and then `then` on one of them; does not wait.
  // For tasks, which must not block their thread. Neither must throw.
  void ForEach(int64_t count, std::function<void(int64_t)> body, std::function<void()> then);
  // The same, and waits. Within a task, the task's own thread runs indices that no other thread has
  // begun, of any node. So tasks never wait for one another.
  void ForEach(int64_t count, absl::FunctionRef<void(int64_t)> body);

  // The calling worker's node; -1 for other threads, and with a single node.
  int CurrentNode() const;
  // False once a worker could not be bound to its node.
  bool bound() const;

 private:
  struct Impl;
  const int threads_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TASK_POOL_H_
