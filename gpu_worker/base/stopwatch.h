// Time since construction or the last lap.
#ifndef BALLAST_GPU_WORKER_BASE_STOPWATCH_H_
#define BALLAST_GPU_WORKER_BASE_STOPWATCH_H_

#include <chrono>

namespace ballast::worker {

class Stopwatch {
 public:
  // Seconds since the last lap; starts the next.
  double Lap() {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> lap = now - start_;
    start_ = now;
    return lap.count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BASE_STOPWATCH_H_
