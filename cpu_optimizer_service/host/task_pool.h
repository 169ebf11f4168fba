// The threads that do the engine's arithmetic: oneTBB's, in an arena of their own for each NUMA
// node.
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
// Every task gets its turn soon, whatever else there is: tasks begin in the order of Start, and a
// loop over many indices gives up its threads after a slice of some milliseconds and queues again
// behind what has come meanwhile.
//
// Where there are several nodes each thread is bound to one of them, and index i of `count` belongs
// to node NodeOf(i, count): each node's share is that of its threads. Memory that is touched and
// worked on by the same indices is so always near to the threads that use it.
class TaskPool {
 public:
  static constexpr int kAnyNode = -1;
  // So long a worker works for one loop or queue (task_queue.h) before others have their turn: a
  // few chunks.
  static constexpr std::chrono::milliseconds kSlice{2};

  // `threads` workers; 0: one per processor that this process may use.
  explicit TaskPool(int threads, const Topology& topology = MachineTopology());
  ~TaskPool();  // Waits for all tasks that Start was given.

  int threads() const { return threads_; }
  struct Use {
    int64_t tasks = 0;        // Queued or running now.
    double busy_seconds = 0;  // Of all threads together, in tasks that have ended.
  };
  Use use() const;
  int nodes() const;
  int threads_of(int node) const;
  int NodeOf(int64_t index, int64_t count) const;

  // Runs `task`, which must not throw, on a worker, of `node` if given, soon; does not wait.
  // Throws std::bad_alloc, and has done nothing then. Where the system lets the pool have no threads,
  // the process ends, with one line.
  void Start(std::function<void()> task, int node = kAnyNode);
  // Runs body(0) ... body(count - 1), spread over the workers, and then `then`, on one of them;
  // does not wait. For tasks, which must not block their thread. Neither must throw. Throws
  // std::bad_alloc before it has begun; after that, what no worker can be queued for runs here.
  void ForEach(int64_t count, std::function<void(int64_t)> body, std::function<void()> then);
  // The same, and waits; then throws a body's first exception. From within a task, that task's own
  // thread runs what no other has begun, of any node, so that tasks never wait for one another.
  void ForEach(int64_t count, absl::FunctionRef<void(int64_t)> body);

  // With several nodes: the one whose worker calls; -1 for a thread that is none of ours, and with
  // one node.
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
