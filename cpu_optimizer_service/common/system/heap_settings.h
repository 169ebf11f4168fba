// How glibc's heap treats memory that is free again, set once for a process that receives messages.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HEAP_SETTINGS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HEAP_SETTINGS_H_

namespace ballast {

// Keeps free memory in the process up to half a GiB, instead of giving it back to the system after
// every few messages and faulting it in again. The first call counts. Thread-safe.
void KeepHeapWarm();

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HEAP_SETTINGS_H_
