// Cross-entropy against the CPU model's, in double. Losses are fp32, and differ by 1e-5 at most;
// gradients are rounded to bf16 at the end, 2^-8 relative.
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "gpu_worker/cpu/cross_entropy.h"
#include "gpu_worker/cuda/kernels/cross_entropy.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

struct Case {
  int64_t rows;
  int vocabulary;
  float spread = 3;  // The logits'.
};

const Case kCases[] = {
    {257, 8}, {31, 37}, {9, 256}, {3, 50304}, {2, 1001}, {4, 1}, {7, 264, 100},
};

std::vector<int32_t> RandomTargets(const Case& c, uint64_t seed) {
  std::vector<int32_t> targets(c.rows);
  for (int64_t row = 0; row < c.rows; ++row) {
    targets[row] = static_cast<int32_t>(RandomBits(seed, 3, row) % c.vocabulary);
  }
  targets[0] = c.vocabulary - 1;  // The lane at the end of the row.
  return targets;
}

class CrossEntropyKernels : public KernelTest {
 protected:
  struct Result {
    std::vector<BFloat16Bits> gradient;
    std::vector<float> losses;
  };

  Result RunCrossEntropy(const Case& c, const std::vector<BFloat16Bits>& logits,
                         const std::vector<int32_t>& targets, float scale) {
    const auto d_logits = Upload(logits);
    const auto d_targets = Upload(targets);
    const auto losses = Poisoned<float>(c.rows);
    Run(CrossEntropy(stream(), c.rows, c.vocabulary, d_targets.data(), scale, d_logits.data(),
                     losses.data()));
    return {Download(d_logits), Download(losses)};
  }

  double SumOf(const std::vector<float>& losses, bool add, double before) {
    const auto d_losses = Upload(losses);
    const auto sum = Upload(std::vector<double>{before});
    Run(SumLosses(stream(), static_cast<int64_t>(losses.size()), d_losses.data(), add, sum.data()));
    return Download(sum)[0];
  }
};

TEST_F(CrossEntropyKernels, LossAndGradientEqualTheCpuModel) {
  for (const Case& c : kCases) {
    const std::string name = absl::StrCat(c.rows, " x ", c.vocabulary, ": ");
    const auto logits = RandomBFloat16(c.rows * c.vocabulary, 1, c.spread);
    const auto targets = RandomTargets(c, 2);
    constexpr double kScale = 0.25;
    const Result result = RunCrossEntropy(c, logits, targets, kScale);

    std::vector<double> gradient = Widen<double>(logits), losses(c.rows);
    cpu::CrossEntropy<double>({static_cast<int>(c.rows), c.vocabulary}, targets.data(),
                              gradient.data(), losses.data());
    for (double& g : gradient) g *= kScale;
    ExpectClose(name + "loss", result.losses, losses, 1e-6, 1e-5);
    ExpectClose(name + "gradient", Widen<float>(result.gradient), gradient,
                1.02 * kBFloat16Rounding, 1e-6 * kScale);
  }
}

TEST_F(CrossEntropyKernels, LargeLogitsDoNotOverflow) {
  const Case c = {.rows = 2, .vocabulary = 16};
  std::vector<float> logits(32, -3e38f);
  logits[5] = 3e38f;
  logits[16 + 3] = 1e4f;
  const Result result = RunCrossEntropy(c, ToBFloat16(logits), {5, 3}, 1);
  EXPECT_EQ(result.losses, (std::vector<float>{0, 0}));
  EXPECT_THAT(Widen<float>(result.gradient), testing::Each(0.0f));
}

TEST_F(CrossEntropyKernels, EqualLogitsGiveTheLogarithmOfTheVocabulary) {
  const Case c = {.rows = 1, .vocabulary = 50304};
  const Result result =
      RunCrossEntropy(c, std::vector<BFloat16Bits>(50304, FloatToBFloat16(-7)), {12345}, 1);
  EXPECT_NEAR(result.losses[0], std::log(50304.0), 1e-5);
  EXPECT_NEAR(BFloat16ToFloat(result.gradient[12345]), 1 / 50304.0 - 1, 0.004);
  EXPECT_NEAR(BFloat16ToFloat(result.gradient[50303]), 1 / 50304.0, 0.004 / 50304);
}

TEST_F(CrossEntropyKernels, ANonFiniteLogitShowsInItsRowAlone) {
  const Case c = {.rows = 2, .vocabulary = 300};
  auto logits = RandomFloats(600, 3);
  logits[17] = NAN;
  const Result result = RunCrossEntropy(c, ToBFloat16(logits), {4, 4}, 1);
  EXPECT_TRUE(std::isnan(result.losses[0]));
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(result.gradient[0])));
  EXPECT_TRUE(std::isfinite(result.losses[1]));
  EXPECT_TRUE(std::isfinite(BFloat16ToFloat(result.gradient[300])));
}

TEST_F(CrossEntropyKernels, RepeatsToTheBit) {
  const Case c = {.rows = 5, .vocabulary = 10008};
  const auto logits = RandomBFloat16(c.rows * c.vocabulary, 4, 3);
  const auto targets = RandomTargets(c, 5);
  const Result first = RunCrossEntropy(c, logits, targets, 1);
  const Result second = RunCrossEntropy(c, logits, targets, 1);
  EXPECT_EQ(second.losses, first.losses);
  EXPECT_EQ(second.gradient, first.gradient);
}

TEST_F(CrossEntropyKernels, LossesAreSummedInDouble) {
  for (const size_t rows : {1, 31, 1024, 5003}) {
    // Of 24 bits, so that no sum of fp32 is exact.
    const auto losses = RandomFloats(rows, 6, 1.1f);
    double expected = 0;
    for (const float loss : losses) expected += loss;
    EXPECT_NEAR(SumOf(losses, /*add=*/false, NAN), expected, 1e-10) << rows;
    EXPECT_NEAR(SumOf(losses, /*add=*/true, 100), expected + 100, 1e-10) << rows;
    EXPECT_EQ(SumOf(losses, false, 0), SumOf(losses, false, 0)) << rows;
  }
}

TEST_F(CrossEntropyKernels, NoLossesSumToZero) {
  EXPECT_EQ(SumOf({}, /*add=*/false, NAN), 0.0);
  EXPECT_EQ(SumOf({}, /*add=*/true, 7), 7.0);
}

}  // namespace
}  // namespace ballast::worker::cuda
