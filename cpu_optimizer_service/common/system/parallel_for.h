// The one wrapper of oneTBB's loops. It tells ThreadSanitizer the edges between the caller and the
// tasks, which the distribution's uninstrumented TBB hides.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_PARALLEL_FOR_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_PARALLEL_FOR_H_

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace ballast {

// Runs body(0) ... body(count - 1), spread over the threads of the task arena that the caller is
// in, and waits for them. `body` does not throw.
void ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body);

// A happens-before edge: the thread that calls Acquire sees everything before Release. Only for
// what TBB really orders. Without ThreadSanitizer it has no effect.
class TsanEdge {
 public:
  void Release();
  void Acquire();

 private:
  [[maybe_unused]] char address_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_PARALLEL_FOR_H_
