#include "gpu_worker/buckets/non_finite.h"

#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <vector>

namespace ballast::worker {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(FirstNonFinite, IsTheFirstOfAnyKind) {
  EXPECT_FALSE(FirstNonFinite({}, DType::kFloat32).has_value());
  const std::vector<float> values = {1.0f, std::numeric_limits<float>::quiet_NaN(), kInfinity};
  const std::optional<NonFiniteElement> found = FirstNonFinite(values, DType::kFloat32);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->index, 1);
  EXPECT_TRUE(std::isnan(found->value));
}

TEST(FirstNonFinite, MayBeOneThatOverflowsTheFormatItTravelsIn) {
  const std::vector<float> values = {1.0f, 65504.0f, -65520.0f};
  EXPECT_FALSE(FirstNonFinite(values, DType::kBFloat16).has_value());
  EXPECT_FALSE(FirstNonFinite(values, DType::kFloat32).has_value());
  const std::optional<NonFiniteElement> found = FirstNonFinite(values, DType::kFloat16);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->index, 2);
  EXPECT_EQ(found->value, -kInfinity);
}

TEST(NonFinite, TheFirstIsThatOfTheLeastParameterAndThereOfTheLeastElement) {
  EXPECT_TRUE(ComesFirst(9, 9, std::nullopt));
  const std::optional<NonFinite> first =
      NonFinite{.parameter = 2, .element = 5, .value = kInfinity};
  EXPECT_TRUE(ComesFirst(1, 7, first));
  EXPECT_TRUE(ComesFirst(2, 4, first));
  EXPECT_FALSE(ComesFirst(2, 5, first));
  EXPECT_FALSE(ComesFirst(2, 6, first));
  EXPECT_FALSE(ComesFirst(3, 0, first));
}

}  // namespace
}  // namespace ballast::worker
