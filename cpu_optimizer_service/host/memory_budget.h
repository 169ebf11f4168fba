// The memory that all jobs of a service share. A request that does not fit is refused before memory
// is allocated.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_MEMORY_BUDGET_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_MEMORY_BUDGET_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

class MemoryBudget {
 public:
  // A part of the budget, given back on destruction.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept;
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation() { Release(); }
    int64_t bytes() const { return bytes_; }
    // Gives back everything above `bytes`.
    void ShrinkTo(int64_t bytes);

   private:
    friend class MemoryBudget;
    Reservation(MemoryBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
    void Release();

    MemoryBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
  };

  explicit MemoryBudget(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // RESOURCE_EXHAUSTED with needed, used and limit. `what` names the asker: "job gpt2".
  // Outlives its reservations. Thread-safe.
  absl::StatusOr<Reservation> Reserve(int64_t bytes, absl::string_view what);
  // For an earlier process's existing memory: may exceed the limit.
  Reservation Take(int64_t bytes);

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t used_bytes() const;

 private:
  const int64_t limit_bytes_;
  mutable Mutex mutex_;
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_MEMORY_BUDGET_H_
