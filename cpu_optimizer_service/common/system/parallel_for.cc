// This file and task_pool.cc alone are compiled without ThreadSanitizer's instrumentation: TBB's
// templates are instantiated here, and what its binary does to order them cannot be seen.
#include "cpu_optimizer_service/common/system/parallel_for.h"

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#ifdef BALLAST_TSAN
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace ballast {

void TsanEdge::Release() {
#ifdef BALLAST_TSAN
  __tsan_release(&address_);
#endif
}

void TsanEdge::Acquire() {
#ifdef BALLAST_TSAN
  __tsan_acquire(&address_);
#endif
}

void ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body) {
  // `fork`: tasks see what the caller has written. `join`: the caller sees what they have written.
  TsanEdge fork;
  TsanEdge join;
  fork.Release();
  tbb::parallel_for(
      // Each index is a task of its own. Callers put enough work into one, and with TBB's own
      // partitioner several of them could stay with one thread while others are idle.
      tbb::blocked_range<int64_t>(0, count, 1),
      [&](const tbb::blocked_range<int64_t>& range) {
        fork.Acquire();
        for (int64_t i = range.begin(); i != range.end(); ++i) body(i);
        join.Release();
      },
      tbb::simple_partitioner());
  join.Acquire();
}

}  // namespace ballast
