// Stores into memory that outlives this process, on whose order a later process relies. Only the
// compiler could change it: after this process's death its stores are there in their order.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ORDERED_STORES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ORDERED_STORES_H_

#include <atomic>
#include <cstdint>

namespace ballast {

// What this thread has stored before comes before what it stores after.
inline void KeepOrderOfStores() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// After all that was stored before, before all that comes later, and as a whole.
inline void StoreWord(uint64_t& word, uint64_t value) {
  KeepOrderOfStores();
  *static_cast<volatile uint64_t*>(&word) = value;
  KeepOrderOfStores();
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ORDERED_STORES_H_
