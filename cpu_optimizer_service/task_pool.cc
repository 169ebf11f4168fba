#include "cpu_optimizer_service/task_pool.h"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <utility>

#include "cpu_optimizer_service/common/mutex.h"

// This file alone is compiled without instrumentation: TBB's templates are instantiated here, and
// what its binary does to order them cannot be seen.
#ifdef BALLAST_TSAN
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace ballast {
namespace {

// A happens-before edge: everything before Release is seen by whoever calls Acquire after it. TBB
// orders them in truth; this only tells ThreadSanitizer.
struct Edge {
  char address = 0;
  void Release() {
#ifdef BALLAST_TSAN
    __tsan_release(&address);
#endif
  }
  void Acquire() {
#ifdef BALLAST_TSAN
    __tsan_acquire(&address);
#endif
  }
};

}  // namespace

struct TaskPool::Impl {
  explicit Impl(int threads)
      // TBB counts the calling thread in; ours only wait, so allow one more.
      : parallelism(tbb::global_control::max_allowed_parallelism, threads + 1), arena(threads, 0) {}

  tbb::global_control parallelism;
  tbb::task_arena arena;
  Mutex mutex;
  CondVar idle;
  int64_t running ABSL_GUARDED_BY(mutex) = 0;
};

TaskPool::TaskPool(int threads)
    : threads_(threads > 0 ? threads : tbb::info::default_concurrency()),
      impl_(std::make_unique<Impl>(threads_)) {}

TaskPool::~TaskPool() {
  MutexLock lock(impl_->mutex);
  while (impl_->running > 0) impl_->idle.Wait(impl_->mutex);
}

void TaskPool::Start(std::function<void()> task) {
  {
    MutexLock lock(impl_->mutex);
    ++impl_->running;
  }
  struct Started {
    ~Started() { edge.Acquire(); }  // Whoever of the two is last frees what both have used.
    std::function<void()> task;
    Edge edge;
  };
  auto started = std::make_shared<Started>();
  started->task = std::move(task);
  started->edge.Release();
  impl_->arena.enqueue([impl = impl_.get(), started] {
    started->edge.Acquire();
    started->task();
    started->task = nullptr;  // What it owns goes before the pool may: TBB keeps the lambda longer.
    started->edge.Release();
    MutexLock lock(impl->mutex);
    if (--impl->running == 0) impl->idle.NotifyAll();
  });
}

void TaskPool::ForEach(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  Edge fork;
  Edge join;
  fork.Release();
  impl_->arena.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<int64_t>(0, count, 1),
        [&](const tbb::blocked_range<int64_t>& range) {
          fork.Acquire();
          for (int64_t i = range.begin(); i != range.end(); ++i) body(i);
          join.Release();
        },
        tbb::simple_partitioner());
  });
  join.Acquire();
}

}  // namespace ballast
