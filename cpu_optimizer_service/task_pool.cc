#include "cpu_optimizer_service/task_pool.h"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/task_arena.h>

#include <utility>

#include "cpu_optimizer_service/common/mutex.h"
#include "cpu_optimizer_service/common/parallel_for.h"

namespace ballast {

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
    TsanEdge edge;
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
  impl_->arena.execute([&] { ParallelFor(count, body); });
}

}  // namespace ballast
