// The clock for waits: nobody sets it, unlike the time of day.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_STEADY_TIME_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_STEADY_TIME_H_

#include <chrono>

#include "absl/time/time.h"

namespace ballast {

// Since a fixed, otherwise meaningless moment of this process.
inline absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

inline double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_STEADY_TIME_H_
