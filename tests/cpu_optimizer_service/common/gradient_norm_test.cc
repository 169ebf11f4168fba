#include "cpu_optimizer_service/common/gradient_norm.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/floating_point_mode.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::gradient_norm_test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

double SumOfSquares(const std::vector<float>& block) {
  return BlockSumOfSquaresReference(block.data(), DType::kFloat32);
}

// The order of the header, as a recursion.
double AddLanes(const std::vector<double>& lanes, size_t lane, size_t distance) {
  if (distance == 16) return lanes[lane];
  return AddLanes(lanes, lane, distance * 2) + AddLanes(lanes, lane + distance, distance * 2);
}

TEST(BlockSumOfSquares, AddsInTheWrittenOrder) {
  std::mt19937 random(7);
  for (int turn = 0; turn < 100; ++turn) {
    std::vector<float> block(kBlockElements);
    std::vector<double> lanes(16);
    for (int64_t i = 0; i < kBlockElements; ++i) {
      block[i] = std::ldexp(static_cast<float>(random() % 100000), static_cast<int>(random() % 60));
      lanes[i % 16] += double{block[i]} * double{block[i]};
    }
    ASSERT_EQ(SumOfSquares(block), AddLanes(lanes, 0, 1));
  }
}

TEST(BlockSumOfSquares, CountsDenormalsInEveryMode) {
  const std::vector<float> block(kBlockElements, 0x1p-149f);
  EXPECT_EQ(SumOfSquares(block), 256 * 0x1p-298);
  const ScopedFloatingPointMode flush(Denormals::kFlush);
  EXPECT_EQ(SumOfSquares(block), 256 * 0x1p-298);
}

TEST(BlockSumOfSquares, IsFiniteExactlyWhenAllElementsAre) {
  std::vector<float> block(kBlockElements, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(SumOfSquares(block)));
  block[255] = -kInfinity;
  EXPECT_EQ(SumOfSquares(block), kInfinity);
  block[0] = kNan;
  EXPECT_TRUE(std::isnan(SumOfSquares(block)));
}

TEST(BlockSumOfSquares, OfAShortBlockIsThatOfTheBlockWithZerosAfterIt) {
  std::mt19937 random(7);
  for (int64_t elements = 0; elements <= kBlockElements; ++elements) {
    std::vector<float> block(elements);
    for (float& value : block) {
      value = std::ldexp(static_cast<float>(random() % 100000), static_cast<int>(random() % 60));
    }
    std::vector<float> padded = block;
    padded.resize(kBlockElements, 0.0f);
    ASSERT_EQ(BlockSumOfSquaresReference(block.data(), DType::kFloat32, elements),
              SumOfSquares(padded));
  }
}

TEST(BlockSumOfSquares, ReadsEveryFormat) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    std::vector<float> bytes(kBlockElements);
    for (int64_t i = 0; i < kBlockElements; ++i) StoreElement(bytes.data(), dtype, i, 0.5f);
    EXPECT_EQ(BlockSumOfSquaresReference(bytes.data(), dtype), 64.0) << Name(dtype);
  }
}

Decision DecideOn(const std::vector<std::vector<double>>& sums, const GradientScale& scale,
                  double max_norm) {
  std::vector<double> group_sums;
  for (const std::vector<double>& block_sums : sums) {
    ExactSum sum;
    sum.Add(block_sums);
    group_sums.push_back(sum.Rounded());
  }
  return Decide(group_sums, scale, {.max_norm = max_norm});
}

TEST(Decide, UnscalesAndDividesEachGroupByItsOwn) {
  // Gradients are 8 times too large, and those of group 1 are summed over 2 samples.
  const Decision decision =
      DecideOn({{64.0, 64.0}, {256.0}}, {.loss_scale = 8, .divisors = {1, 2}}, /*max_norm=*/0);
  EXPECT_TRUE(decision.apply);
  EXPECT_EQ(decision.norm, std::sqrt(2.0 + 1.0));
  EXPECT_EQ(decision.clip_coefficient, 1.0);
  EXPECT_THAT(decision.multipliers, testing::ElementsAre(1.0f / 8, 1.0f / 16));
}

TEST(Decide, ClipsAsTorchDoes) {
  const Decision decision = DecideOn({{16.0}, {9.0}}, {}, /*max_norm=*/1);
  EXPECT_EQ(decision.norm, 5.0);
  EXPECT_EQ(decision.clip_coefficient, 1 / (5.0 + 1e-6));
  EXPECT_THAT(decision.multipliers, testing::Each(static_cast<float>(decision.clip_coefficient)));
  EXPECT_EQ(decision.multipliers.size(), 2u);
}

TEST(Decide, NeverMakesAGradientLarger) {
  EXPECT_EQ(DecideOn({{0.25}}, {}, /*max_norm=*/1).clip_coefficient, 1.0);
  EXPECT_EQ(DecideOn({{0.0}}, {}, /*max_norm=*/1).clip_coefficient, 1.0);
}

TEST(Decide, DoesNotClipWithoutALimit) {
  EXPECT_EQ(DecideOn({{1e8}}, {}, 0).clip_coefficient, 1.0);
  EXPECT_EQ(DecideOn({{1e8}}, {}, -1).clip_coefficient, 1.0);
}

TEST(Decide, SkipsWhenTheNormIsNotFinite) {
  for (const double bad : {double{kInfinity}, double{kNan}}) {
    const Decision decision = DecideOn({{1.0}, {1.0, bad}}, {}, 1);
    EXPECT_FALSE(decision.apply);
    EXPECT_FALSE(std::isfinite(decision.norm));
    EXPECT_THAT(decision.multipliers, testing::IsEmpty());
  }
}

TEST(Decide, TakesGroupsWithoutBlocks) {
  const Decision decision = DecideOn({{}, {4.0}, {}}, {}, 0);
  EXPECT_EQ(decision.norm, 2.0);
  EXPECT_EQ(decision.multipliers.size(), 3u);
  EXPECT_TRUE(DecideOn({}, {}, 1).apply);
}

}  // namespace
}  // namespace ballast::gradient_norm_test
