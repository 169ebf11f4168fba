#include "cpu_optimizer_service/host/task_pool.h"

#include <tbb/global_control.h>
#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/parallel_for.h"

namespace ballast {
namespace {

// The pool of several nodes, and its node, that the calling thread works for now.
struct Place {
  const void* pool = nullptr;
  int node = -1;
};
thread_local Place this_place;

class ScopedPlace {
 public:
  explicit ScopedPlace(Place place) : saved_(std::exchange(this_place, place)) {}
  ~ScopedPlace() { this_place = saved_; }

 private:
  const Place saved_;
};

// Binds the threads that enter an arena to a node. TBB lends a thread now to one arena and now to
// another, of this pool or of someone else, so this happens at every entry and ends at every exit.
class Binding : public tbb::task_scheduler_observer {
 public:
  Binding(tbb::task_arena& arena, const Topology& topology, int node, std::atomic<bool>& failed)
      : task_scheduler_observer(arena),
        processors_(topology.nodes[node].processors),
        failed_(failed) {
    for (const NumaNode& each : topology.nodes) {
      all_.insert(all_.end(), each.processors.begin(), each.processors.end());
    }
    edge_.Release();
    observe(true);
  }
  ~Binding() override {
    observe(false);  // Waits for the calls below that are under way.
    left_.Acquire();
  }

  void on_scheduler_entry(bool) override {
    edge_.Acquire();
    if (!BindThisThread(processors_)) failed_.store(true, std::memory_order_relaxed);
    left_.Release();
  }
  void on_scheduler_exit(bool) override {
    edge_.Acquire();
    BindThisThread(all_);
    left_.Release();
  }

 private:
  const std::vector<int> processors_;
  std::vector<int> all_;  // Constant after construction.
  TsanEdge edge_;         // From the constructor to the threads that TBB calls from.
  TsanEdge left_;         // From them to the destructor.
  std::atomic<bool>& failed_;
};

// One ForEach over several nodes. Each node's workers take the indices of its share one by one.
struct NodeLoop {
  struct Share {
    std::atomic<int64_t> next = 0;
    int64_t end = 0;
    std::atomic<bool> begun = false;  // By a worker of the node, which will go on to the end.
  };

  NodeLoop(absl::FunctionRef<void(int64_t)> body, int64_t count, const std::vector<int64_t>& ends)
      : body(body), shares(ends.size()), remaining(count) {
    int64_t begin = 0;
    for (size_t node = 0; node < ends.size(); ++node) {
      shares[node].next = begin;
      shares[node].end = ends[node];
      begin = ends[node];
    }
  }
  ~NodeLoop() { edge.Acquire(); }  // The last one frees what all have used.

  // False if no index is left.
  bool RunOne(Share& share) {
    const int64_t index = share.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= share.end) return false;
    body(index);
    MutexLock lock(mutex);
    if (--remaining == 0) done.NotifyAll();
    return true;
  }
  void RunAll(Share& share) {
    share.begun.store(true, std::memory_order_relaxed);
    while (RunOne(share)) continue;
  }
  // What no thread has begun, so that no task waits for a worker that waits for this task.
  void RunUntilBegun(Share& share) {
    while (!share.begun.load(std::memory_order_relaxed) && RunOne(share)) continue;
  }
  void Wait() {
    MutexLock lock(mutex);
    while (remaining > 0) done.Wait(mutex);
  }

  const absl::FunctionRef<void(int64_t)> body;  // Not called once all indices are taken.
  std::vector<Share> shares;
  TsanEdge edge;
  Mutex mutex;
  CondVar done;
  int64_t remaining ABSL_GUARDED_BY(mutex);
};

}  // namespace

struct TaskPool::Impl {
  struct Node {
    explicit Node(int threads) : threads(threads), arena(threads, 0) {}
    const int threads;
    tbb::task_arena arena;
    std::optional<Binding> binding;
  };

  Impl(const Topology& topology, int threads)
      // TBB counts the calling thread in; ours only wait, so allow one more.
      : parallelism(tbb::global_control::max_allowed_parallelism, threads + 1) {
    const std::vector<int> threads_of = ThreadsPerNode(topology, threads);
    for (int node = 0; node < static_cast<int>(threads_of.size()); ++node) {
      threads_up_to.push_back(threads_of[node] + (node == 0 ? 0 : threads_up_to.back()));
      nodes.push_back(std::make_unique<Node>(threads_of[node]));
      if (threads_of.size() == 1) continue;  // The system places the threads well enough.
      nodes[node]->binding.emplace(nodes[node]->arena, topology, node, binding_failed);
    }
  }

  // The place of a task that runs on `node`.
  Place PlaceOf(int node) const { return nodes.size() == 1 ? Place() : Place{this, node}; }
  // The first of `count` indices that does not belong to `node` or one before it.
  int64_t EndOf(size_t node, int64_t count) const {
    return (count * threads_up_to[node] + threads_up_to.back() - 1) / threads_up_to.back();
  }
  bool IsOurs(const Place& place) const { return place.pool == this; }

  tbb::global_control parallelism;
  std::atomic<bool> binding_failed = false;
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<int64_t> threads_up_to;   // By node: its threads and those of the nodes before it.
  std::atomic<uint64_t> next_node = 0;  // For tasks that any may run.
  Mutex mutex;
  CondVar idle;
  int64_t running ABSL_GUARDED_BY(mutex) = 0;
};

TaskPool::TaskPool(int threads, const Topology& topology)
    : threads_(threads > 0 ? threads : topology.processors()),
      impl_(std::make_unique<Impl>(topology, threads_)) {}

TaskPool::~TaskPool() {
  MutexLock lock(impl_->mutex);
  while (impl_->running > 0) impl_->idle.Wait(impl_->mutex);
}

int TaskPool::nodes() const { return static_cast<int>(impl_->nodes.size()); }

int TaskPool::NodeOf(int64_t index, int64_t count) const {
  int node = 0;
  while (index >= impl_->EndOf(node, count)) ++node;
  return node;
}

void TaskPool::Start(std::function<void()> task, int node) {
  {
    MutexLock lock(impl_->mutex);
    ++impl_->running;
  }
  struct Started {
    ~Started() { edge.Acquire(); }  // The later of the two frees what both have used.
    std::function<void()> task;
    TsanEdge edge;
  };
  auto started = std::make_shared<Started>();
  started->task = std::move(task);
  started->edge.Release();
  if (node == kAnyNode) {
    node = static_cast<int>(impl_->next_node.fetch_add(1) % impl_->nodes.size());
  }
  impl_->nodes[node]->arena.enqueue([impl = impl_.get(), started, node] {
    const ScopedPlace place(impl->PlaceOf(node));
    started->edge.Acquire();
    started->task();
    started->task = nullptr;  // What it owns goes before the pool may: TBB keeps the lambda longer.
    started->edge.Release();
    MutexLock lock(impl->mutex);
    if (--impl->running == 0) impl->idle.NotifyAll();
  });
}

void TaskPool::ForEach(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  if (count <= 0) return;
  if (nodes() == 1) {
    impl_->nodes[0]->arena.execute([&] { ParallelFor(count, body); });
    return;
  }
  std::vector<int64_t> ends;
  for (size_t node = 0; node < impl_->nodes.size(); ++node) {
    ends.push_back(impl_->EndOf(node, count));
  }
  auto loop = std::make_shared<NodeLoop>(body, count, ends);
  for (int node = 0; node < nodes(); ++node) {
    NodeLoop::Share& share = loop->shares[node];
    const int64_t elements = share.end - share.next.load(std::memory_order_relaxed);
    const int64_t workers = std::min<int64_t>(impl_->nodes[node]->threads, elements);
    for (int64_t worker = 0; worker < workers; ++worker) {
      // Counted as running: the pool must not end before TBB has let go of them.
      Start(
          [loop, node] {
            loop->RunAll(loop->shares[node]);
            loop->edge.Release();
          },
          node);
    }
  }
  if (const Place here = this_place; impl_->IsOurs(here)) {
    loop->RunAll(loop->shares[here.node]);
    for (NodeLoop::Share& share : loop->shares) loop->RunUntilBegun(share);
  }
  loop->Wait();
  loop->edge.Release();
}

int TaskPool::CurrentNode() const { return impl_->IsOurs(this_place) ? this_place.node : -1; }

bool TaskPool::bound() const { return !impl_->binding_failed.load(std::memory_order_relaxed); }

}  // namespace ballast
