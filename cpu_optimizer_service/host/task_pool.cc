#include "cpu_optimizer_service/host/task_pool.h"

#include <tbb/global_control.h>
#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/limits/processors.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/parallel_for.h"

namespace ballast {
namespace {

// The pool, and its node, that the calling thread works for now.
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

// TBB has taken a task for a thread that it cannot start, and does not try again: whoever waits for
// the task would wait without an end.
[[noreturn]] void EndWithoutThreads(const std::exception& error) {
  std::fprintf(stderr,
               "the engine cannot start its threads (%s); raise the limit of processes and threads "
               "(ulimit -u, TasksMax, pids.max)\n",
               error.what());
  std::_Exit(1);
}

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
    // Last, since TBB may call from other threads from here on.
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

// One ForEach. Each node's workers take the indices of its share one by one.
struct Loop {
  struct Share {
    std::atomic<int64_t> next = 0;
    int64_t end = 0;
  };

  Loop(std::function<void(int64_t)> body, std::function<void()> then, int64_t count,
       const std::vector<int64_t>& ends)
      : body(std::move(body)), then(std::move(then)), shares(ends.size()), remaining(count) {
    int64_t begin = 0;
    for (size_t node = 0; node < ends.size(); ++node) {
      shares[node].next = begin;
      shares[node].end = ends[node];
      begin = ends[node];
    }
  }
  ~Loop() { edge.Acquire(); }  // The last one frees what all have used.

  // False if no index is left.
  bool RunOne(Share& share) {
    const int64_t index = share.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= share.end) return false;
    body(index);
    edge.Release();
    // acq_rel: each subtraction hands on what its body has stored, and the last one has all of it
    // before it calls `then`.
    if (remaining.fetch_sub(1, std::memory_order_acq_rel) > 1) return true;
    edge.Acquire();
    body = nullptr;  // What it keeps alive goes first.
    std::exchange(then, nullptr)();
    return false;
  }
  void RunAll(Share& share) {
    while (RunOne(share)) continue;
  }
  // False if no index is left.
  bool RunSlice(Share& share) {
    const auto end = std::chrono::steady_clock::now() + TaskPool::kSlice;
    while (RunOne(share)) {
      if (std::chrono::steady_clock::now() >= end) return true;
    }
    return false;
  }

  std::function<void(int64_t)> body;  // Not called once all indices are taken, nor is the next.
  std::function<void()> then;
  std::vector<Share> shares;
  std::atomic<int64_t> remaining;  // Not done yet.
  TsanEdge edge;
};

}  // namespace

struct TaskPool::Impl {
  struct Node {
    // The 0: no place of the arena is reserved for a thread that calls, since all work is queued.
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

  // Queues a loop's worker.
  void Work(TaskPool& pool, std::shared_ptr<Loop> loop, int node);
  std::shared_ptr<Loop> StartLoop(TaskPool& pool, int64_t count, std::function<void(int64_t)> body,
                                  std::function<void()> then);
  // The first of `count` indices that does not belong to `node` or one before it.
  int64_t EndOf(size_t node, int64_t count) const {
    // In proportion to threads, rounded up; for the last node it is `count`.
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
  std::chrono::steady_clock::duration busy ABSL_GUARDED_BY(mutex) = {};
};

TaskPool::TaskPool(int threads, const Topology& topology)
    : threads_(threads > 0 ? threads : std::min(topology.processors(), UsableProcessorCount())),
      impl_(std::make_unique<Impl>(topology, threads_)) {}

TaskPool::~TaskPool() {
  MutexLock lock(impl_->mutex);
  while (impl_->running > 0) impl_->idle.Wait(impl_->mutex);
}

TaskPool::Use TaskPool::use() const {
  MutexLock lock(impl_->mutex);
  return {.tasks = impl_->running,
          .busy_seconds = std::chrono::duration<double>(impl_->busy).count()};
}

int TaskPool::nodes() const { return static_cast<int>(impl_->nodes.size()); }

int TaskPool::threads_of(int node) const { return impl_->nodes[node]->threads; }

int TaskPool::NodeOf(int64_t index, int64_t count) const {
  int node = 0;
  while (index >= impl_->EndOf(node, count)) ++node;
  return node;
}

void TaskPool::Start(std::function<void()> task, int node) {
  struct Started {
    std::function<void()> task;
    TsanEdge edge;
  };
  // Of the lambda, which TBB keeps longer than it runs, and so longer than the pool may live: what
  // it owns goes before that.
  auto started = std::make_unique<Started>();
  started->task = std::move(task);
  started->edge.Release();
  if (node == kAnyNode) {
    node = static_cast<int>(impl_->next_node.fetch_add(1) % impl_->nodes.size());
  }
  // Not out of it either: TBB would keep what a task throws, and whoever waits for it would wait
  // without an end.
  const auto run = [impl = impl_.get(), owned = started.get(), node]() noexcept {
    const ScopedPlace place({impl, node});
    const auto begin = std::chrono::steady_clock::now();
    owned->edge.Acquire();
    owned->task();
    delete owned;
    const auto end = std::chrono::steady_clock::now();
    MutexLock lock(impl->mutex);
    impl->busy += end - begin;
    if (--impl->running == 0) impl->idle.NotifyAll();
  };
  {
    MutexLock lock(impl_->mutex);
    // Before it is queued, since it may have ended when enqueue returns, and the destructor must
    // wait for it.
    ++impl_->running;
  }
  try {
    impl_->nodes[node]->arena.enqueue(run);
    (void)started.release();
  } catch (const std::bad_alloc&) {
    std::terminate();  // As where any other small allocation fails.
  } catch (const std::exception& error) {
    EndWithoutThreads(error);
  }
}

void TaskPool::Impl::Work(TaskPool& pool, std::shared_ptr<Loop> loop, int node) {
  pool.Start(
      [this, &pool, loop = std::move(loop), node] {
        const bool more = loop->RunSlice(loop->shares[node]);
        loop->edge.Release();
        if (!more) return;
        // Counted as running before this one ends: the pool cannot be gone.
        Work(pool, loop, node);
        loop->edge.Release();
      },
      node);
}

std::shared_ptr<Loop> TaskPool::Impl::StartLoop(TaskPool& pool, int64_t count,
                                                std::function<void(int64_t)> body,
                                                std::function<void()> then) {
  std::vector<int64_t> ends;
  for (size_t node = 0; node < nodes.size(); ++node) ends.push_back(EndOf(node, count));
  auto loop = std::make_shared<Loop>(std::move(body), std::move(then), count, ends);
  for (int node = 0; node < static_cast<int>(nodes.size()); ++node) {
    const int64_t indices = ends[node] - (node == 0 ? 0 : ends[node - 1]);
    // A worker is one entry in the arena's queue. More of them than threads would only stand before
    // the tasks of others.
    const int64_t workers = std::min<int64_t>(nodes[node]->threads, indices);
    for (int64_t worker = 0; worker < workers; ++worker) Work(pool, loop, node);
  }
  return loop;
}

void TaskPool::ForEach(int64_t count, std::function<void(int64_t)> body,
                       std::function<void()> then) {
  if (count <= 0) return Start(std::move(then));
  impl_->StartLoop(*this, count, std::move(body), std::move(then));
}

void TaskPool::ForEach(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  if (count <= 0) return;
  // The worker that ends it tells under the lock, and touches nothing of it after that.
  struct End {
    TsanEdge edge;
    Mutex mutex;
    CondVar changed;
    bool reached ABSL_GUARDED_BY(mutex) = false;
  } end;
  const std::shared_ptr<Loop> loop = impl_->StartLoop(
      *this, count, [body](int64_t index) { body(index); },
      [&end] {
        end.edge.Release();
        MutexLock lock(end.mutex);
        end.reached = true;
        end.changed.NotifyAll();
      });
  if (const Place here = this_place; impl_->IsOurs(here)) {
    // Its own node's share first, whose memory is near. Then it waits only for bodies that other
    // threads are running, and never for what is queued.
    loop->RunAll(loop->shares[here.node]);
    for (Loop::Share& share : loop->shares) loop->RunAll(share);
    loop->edge.Release();
  }
  MutexLock lock(end.mutex);
  while (!end.reached) end.changed.Wait(end.mutex);
  end.edge.Acquire();
}

int TaskPool::CurrentNode() const {
  return nodes() > 1 && impl_->IsOurs(this_place) ? this_place.node : -1;
}

bool TaskPool::bound() const { return !impl_->binding_failed.load(std::memory_order_relaxed); }

}  // namespace ballast
