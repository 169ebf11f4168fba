#include "cpu_optimizer_service/host/task_queue.h"

#include <chrono>
#include <deque>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

struct TaskQueue::State : std::enable_shared_from_this<State> {
  struct Node {
    std::deque<std::function<void()>> tasks;
    int takers = 0;  // In the pool, or at work.
  };

  explicit State(TaskPool& pool) : pool(pool), nodes(pool.nodes()) {}

  void StartTaker(int node) {
    pool.Start([self = shared_from_this(), node] { self->Take(node); }, node);
  }
  // Runs what waits for `node`, for a slice.
  void Take(int node) {
    const auto end = std::chrono::steady_clock::now() + TaskPool::kSlice;
    while (true) {
      std::function<void()> task;
      {
        MutexLock lock(mutex);
        Node& of = nodes[node];
        // Looked at and counted down under one lock: a task that comes after this finds one taker
        // fewer, and Start sends another.
        if (of.tasks.empty()) {
          --of.takers;
          return;
        }
        task = std::move(of.tasks.front());
        of.tasks.pop_front();
      }
      task();
      // What it keeps alive, such as its job, goes before the next task's turn, and without the
      // lock.
      task = nullptr;
      if (std::chrono::steady_clock::now() < end) continue;
      // The next taker is queued in the pool behind the tasks of others. It has this one's place in
      // `takers`, which so stays as it is.
      return StartTaker(node);
    }
  }

  TaskPool& pool;
  Mutex mutex;
  std::vector<Node> nodes ABSL_GUARDED_BY(mutex);
  int next_node ABSL_GUARDED_BY(mutex) = 0;  // For tasks that any may run.
};

TaskQueue::TaskQueue(TaskPool& pool) : state_(std::make_shared<State>(pool)) {}

void TaskQueue::Start(std::function<void()> task, int node) {
  const std::shared_ptr<State> state = state_;  // The task may own this queue, and end it.
  MutexLock lock(state->mutex);
  if (node == TaskPool::kAnyNode) {
    node = state->next_node;
    state->next_node = (node + 1) % static_cast<int>(state->nodes.size());
  }
  State::Node& of = state->nodes[node];
  of.tasks.push_back(std::move(task));
  // There is a taker for each thread, and none of them goes before it has seen the queue empty.
  if (of.takers == state->pool.threads_of(node)) return;
  ++of.takers;
  state->StartTaker(node);
}

}  // namespace ballast
