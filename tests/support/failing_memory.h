// Allocations that fail, one at a time, by the operator new of the binary that links it.
#ifndef BALLAST_TESTS_SUPPORT_FAILING_MEMORY_H_
#define BALLAST_TESTS_SUPPORT_FAILING_MEMORY_H_

#include <atomic>
#include <cstdint>

namespace ballast {

// Of all threads together, but for those that are spared: allocations until one fails; below 0: none
// does.
extern std::atomic<int64_t> left_until_failure;
extern std::atomic<int64_t> failures;  // Those that did.
extern thread_local bool spared_from_failure;

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_FAILING_MEMORY_H_
