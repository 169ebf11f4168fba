// Statistics of a plane of a parameter. They have no order: of parts that are summed up apart, in
// another cut or by other services, the sum has the same bits.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_PLANE_SUMMARY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_PLANE_SUMMARY_H_

#include <array>
#include <cstdint>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"

namespace ballast {

struct PlaneSummary {
  // Of the finite elements.
  ExactSum squares;
  ExactSum positive;
  ExactSum negative;  // Their magnitudes.
  double min = 0;     // 0 without any, as max.
  double max = 0;
  int64_t zeros = 0;
  int64_t non_finite = 0;
  // Counts of |x| by decade: [i] counts 10^(i-12) <= |x| < 10^(i-11); smaller non-zero values count
  // in the first, larger ones in the last.
  std::array<int64_t, 16> magnitude_histogram = {};

  void Add(absl::Span<const float> values);
  void Add(const PlaneSummary& other);

  int64_t finite() const;
  double norm() const;  // L2.
  double mean() const;  // 0 without any.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_NORM_PLANE_SUMMARY_H_
