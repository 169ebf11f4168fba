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
    do {
      std::function<void()> task;
      {
        MutexLock lock(mutex);
        Node& of = nodes[node];
        if (of.tasks.empty()) {
          --of.takers;
          return;
        }
        task = std::move(of.tasks.front());
        of.tasks.pop_front();
      }
      task();
    } while (std::chrono::steady_clock::now() < end);
    StartTaker(node);
  }

  TaskPool& pool;
  Mutex mutex;
  std::vector<Node> nodes ABSL_GUARDED_BY(mutex);
  int next_node ABSL_GUARDED_BY(mutex) = 0;  // For tasks that any may run.
};

TaskQueue::TaskQueue(TaskPool& pool) : state_(std::make_shared<State>(pool)) {}

void TaskQueue::Start(std::function<void()> task, int node) {
  const std::shared_ptr<State> state = state_;  // The task may own this queue, and end it.
  {
    MutexLock lock(state->mutex);
    if (node == TaskPool::kAnyNode) {
      node = state->next_node;
      state->next_node = (node + 1) % static_cast<int>(state->nodes.size());
    }
    State::Node& of = state->nodes[node];
    of.tasks.push_back(std::move(task));
    if (of.takers == state->pool.threads_of(node)) return;
    ++of.takers;
  }
  state->StartTaker(node);
}

}  // namespace ballast
