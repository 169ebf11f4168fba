// Central finite differences for the tests of backward passes.
#ifndef BALLAST_TESTS_GPU_WORKER_CPU_FINITE_DIFFERENCE_H_
#define BALLAST_TESTS_GPU_WORKER_CPU_FINITE_DIFFERENCE_H_

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "gpu_worker/base/random.h"

namespace ballast::worker {

inline std::vector<double> RandomValues(size_t count, uint64_t stream, double scale = 1) {
  std::vector<double> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = scale * RandomNormal(17, stream, i);
  return values;
}

// Some linear function of an output, so that any layer's output becomes a scalar to differentiate.
inline double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Compares `gradient` with (f(x + h) - f(x - h)) / 2h for every element of `x`, in double with
// h = 1e-5: the error is about h^2 = 1e-10 from the third derivative and 1e-16 / h = 1e-11 from
// rounding, so 1e-7 relative to the largest gradient leaves room and lets no wrong term pass.
inline void ExpectGradient(const std::string& what, std::vector<double>& x,
                           const std::vector<double>& gradient, const std::function<double()>& f) {
  ASSERT_EQ(x.size(), gradient.size()) << what;
  constexpr double kStep = 1e-5;
  double largest = 0;
  for (const double g : gradient) largest = std::max(largest, std::abs(g));
  ASSERT_GT(largest, 0) << what;
  for (size_t i = 0; i < x.size(); ++i) {
    const double saved = x[i];
    x[i] = saved + kStep;
    const double above = f();
    x[i] = saved - kStep;
    const double below = f();
    x[i] = saved;
    ASSERT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-7 * largest) << what << " " << i;
  }
}

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_CPU_FINITE_DIFFERENCE_H_
