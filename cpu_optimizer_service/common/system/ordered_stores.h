// Stores into memory that outlives this process. A later process relies on their order. Only the
// compiler could change it: after a crash the process's stores are there in order.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ORDERED_STORES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ORDERED_STORES_H_

#include <atomic>
#include <cstdint>

namespace ballast {

// This thread's earlier stores come before its later ones.
inline void KeepOrderOfStores() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Stores the whole word after all earlier stores and before all later ones.
inline void StoreWord(uint64_t& word, uint64_t value) {
  KeepOrderOfStores();
  *static_cast<volatile uint64_t*>(&word) = value;
  KeepOrderOfStores();
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ORDERED_STORES_H_
