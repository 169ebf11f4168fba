#include "cpu_optimizer_service/common/norm/plane_summary.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace ballast {
namespace {

size_t Decade(double magnitude) {
  // The first is that of 1e-12.
  const double decade = std::floor(std::log10(magnitude)) + 12;
  return static_cast<size_t>(std::clamp(decade, 0.0, 15.0));
}

}  // namespace

void PlaneSummary::Add(absl::Span<const float> values) {
  PlaneSummary added;
  std::vector<double> squared, above, below;
  squared.reserve(values.size());
  for (const float each : values) {
    const double value = each + 0.0;  // No -0, of which min and max would go by the order.
    if (!std::isfinite(value)) {
      ++added.non_finite;
      continue;
    }
    added.min = squared.empty() ? value : std::min(added.min, value);
    added.max = squared.empty() ? value : std::max(added.max, value);
    squared.push_back(value * value);  // Exact: 48 bits.
    if (value == 0) {
      ++added.zeros;
      continue;
    }
    value > 0 ? above.push_back(value) : below.push_back(-value);
    ++added.magnitude_histogram[Decade(std::abs(value))];
  }
  added.squares.Add(squared);
  added.positive.Add(above);
  added.negative.Add(below);
  Add(added);
}

void PlaneSummary::Add(const PlaneSummary& other) {
  if (other.finite() > 0) {
    min = finite() == 0 ? other.min : std::min(min, other.min);
    max = finite() == 0 ? other.max : std::max(max, other.max);
  }
  squares.Add(other.squares);
  positive.Add(other.positive);
  negative.Add(other.negative);
  zeros += other.zeros;
  non_finite += other.non_finite;
  for (size_t i = 0; i < magnitude_histogram.size(); ++i) {
    magnitude_histogram[i] += other.magnitude_histogram[i];
  }
}

int64_t PlaneSummary::finite() const {
  return std::accumulate(magnitude_histogram.begin(), magnitude_histogram.end(), zeros);
}

double PlaneSummary::norm() const { return std::sqrt(squares.Rounded()); }

double PlaneSummary::mean() const {
  const int64_t count = finite();
  if (count == 0) return 0;
  return (positive.Rounded() - negative.Rounded()) / static_cast<double>(count);
}

}  // namespace ballast
