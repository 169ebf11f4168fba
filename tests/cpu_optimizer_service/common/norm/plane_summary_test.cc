#include "cpu_optimizer_service/common/norm/plane_summary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace ballast {
namespace {

std::vector<float> Values(size_t count) {
  std::mt19937_64 random(11);
  std::vector<float> values(count);
  for (float& value : values) {
    value = std::ldexp(static_cast<float>(random() % (1 << 24)) - (1 << 23),
                       static_cast<int>(random() % 60) - 40);
  }
  values[0] = std::numeric_limits<float>::infinity();
  values[1] = std::numeric_limits<float>::quiet_NaN();
  values[2] = std::numeric_limits<float>::max();
  values[3] = -std::numeric_limits<float>::denorm_min();
  values[4] = -0.0f;
  return values;
}

void ExpectEqual(const PlaneSummary& a, const PlaneSummary& b) {
  EXPECT_EQ(a.norm(), b.norm());
  EXPECT_EQ(a.mean(), b.mean());
  EXPECT_EQ(a.min, b.min);
  EXPECT_EQ(a.max, b.max);
  EXPECT_EQ(a.zeros, b.zeros);
  EXPECT_EQ(a.non_finite, b.non_finite);
  EXPECT_EQ(a.magnitude_histogram, b.magnitude_histogram);
}

TEST(PlaneSummary, HasTheSameBitsInAnyParts) {
  std::vector<float> values = Values(3000);
  PlaneSummary whole;
  whole.Add(values);
  EXPECT_EQ(whole.non_finite, 2);
  EXPECT_EQ(whole.finite(), 2998);
  std::mt19937_64 random(7);
  for (int turn = 0; turn < 20; ++turn) {
    std::shuffle(values.begin(), values.end(), random);
    PlaneSummary all;
    for (absl::Span<const float> left = values; !left.empty();) {
      const size_t size = std::min<size_t>(left.size(), random() % 500);
      PlaneSummary part;
      part.Add(left.first(size));
      left.remove_prefix(size);
      all.Add(part);
    }
    ExpectEqual(all, whole);
  }
}

TEST(PlaneSummary, HasNormAndMean) {
  PlaneSummary small;
  small.Add(std::vector<float>{3, -4, 0, 0});
  EXPECT_EQ(small.norm(), 5);
  EXPECT_EQ(small.mean(), -0.25);
}

TEST(PlaneSummary, OfNothingIsZero) {
  PlaneSummary summary;
  PlaneSummary negative;
  negative.Add(std::vector<float>{-2, -1});
  summary.Add(PlaneSummary());
  ExpectEqual(summary, PlaneSummary());
  // No elements have no extremes.
  summary.Add(negative);
  ExpectEqual(summary, negative);
  negative.Add(PlaneSummary());
  EXPECT_EQ(negative.max, -1);
}

}  // namespace
}  // namespace ballast
