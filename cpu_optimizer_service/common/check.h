// Assertions in every build: only for our own bugs, never for what a peer can cause.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_CHECK_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_CHECK_H_

#include <cstdio>
#include <cstdlib>

namespace ballast {

inline void Check(bool condition, const char* what_must_hold) {
  if (condition) return;
  std::fprintf(stderr, "internal error: it must hold that %s\n", what_must_hold);
  std::abort();
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_CHECK_H_
