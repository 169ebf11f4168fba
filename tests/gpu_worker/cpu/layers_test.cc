// Every layer's backward pass against central finite differences, in double; and the two types of
// arithmetic against each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "gpu_worker/cpu/attention.h"
#include "gpu_worker/cpu/cross_entropy.h"
#include "gpu_worker/cpu/embedding.h"
#include "gpu_worker/cpu/exp.h"
#include "gpu_worker/cpu/gelu.h"
#include "gpu_worker/cpu/layer_norm.h"
#include "gpu_worker/cpu/matmul.h"
#include "tests/gpu_worker/cpu/finite_difference.h"

namespace ballast::worker::cpu {
namespace {

using Values = std::vector<double>;

TEST(Matmul, BackwardEqualsFiniteDifferences) {
  const MatmulShape shape{.rows = 5, .in = 7, .out = 3};
  Values in = RandomValues(35, 1), weight = RandomValues(21, 2), bias = RandomValues(3, 3);
  const Values d_out = RandomValues(15, 4);
  Values out(15), d_in(35), d_weight(21), d_bias(3);
  const auto f = [&] {
    MatmulForward(shape, in.data(), weight.data(), bias.data(), out.data());
    return Dot(out, d_out);
  };
  MatmulBackward(shape, d_out.data(), in.data(), weight.data(), d_in.data(), d_weight.data(),
                 d_bias.data());
  ExpectGradient("in", in, d_in, f);
  ExpectGradient("weight", weight, d_weight, f);
  ExpectGradient("bias", bias, d_bias, f);
}

TEST(Matmul, TilesOfRowsAndOutputsGiveTheWholeProduct) {
  // More than one tile of 128 both ways, with a remainder.
  const MatmulShape shape{.rows = 131, .in = 2, .out = 259};
  const Values in = RandomValues(262, 1), weight = RandomValues(518, 2);
  Values out(131 * 259);
  MatmulForward(shape, in.data(), weight.data(), static_cast<const double*>(nullptr), out.data());
  for (const int row : {0, 127, 128, 130}) {
    for (const int o : {0, 127, 128, 258}) {
      EXPECT_NEAR(out[row * 259 + o],
                  in[2 * row] * weight[2 * o] + in[2 * row + 1] * weight[2 * o + 1], 1e-12);
    }
  }
  Values d_in(262), d_weight(518), d_bias(259);
  const Values d_out(131 * 259, 1.0);
  MatmulBackward(shape, d_out.data(), in.data(), weight.data(), d_in.data(), d_weight.data(),
                 d_bias.data());
  EXPECT_THAT(d_bias, testing::Each(131.0));
  double column_sum = 0;
  for (int row = 0; row < 131; ++row) column_sum += in[2 * row + 1];
  EXPECT_NEAR(d_weight[2 * 258 + 1], column_sum, 1e-10);
}

TEST(LayerNorm, BackwardEqualsFiniteDifferences) {
  const LayerNormShape shape{.rows = 4, .width = 6};
  Values in = RandomValues(24, 1), weight = RandomValues(6, 2), bias = RandomValues(6, 3);
  const Values d_out = RandomValues(24, 4);
  Values out(24), mean(4), rstd(4), d_in(24, 0.0), d_weight(6), d_bias(6);
  const auto f = [&] {
    LayerNormForward(shape, in.data(), weight.data(), bias.data(), out.data(), mean.data(),
                     rstd.data());
    return Dot(out, d_out);
  };
  f();
  LayerNormBackward(shape, d_out.data(), in.data(), weight.data(), mean.data(), rstd.data(),
                    d_in.data(), d_weight.data(), d_bias.data());
  ExpectGradient("in", in, d_in, f);
  ExpectGradient("weight", weight, d_weight, f);
  ExpectGradient("bias", bias, d_bias, f);
}

TEST(LayerNorm, BackwardAddsToTheResidualStream) {
  const LayerNormShape shape{.rows = 2, .width = 3};
  const Values in = RandomValues(6, 1), weight = RandomValues(3, 2), d_out = RandomValues(6, 3);
  Values mean = RandomValues(2, 4), rstd = RandomValues(2, 5), d_weight(3), d_bias(3);
  Values from_zero(6, 0.0), from_ten(6, 10.0);
  for (Values* d_in : {&from_zero, &from_ten}) {
    LayerNormBackward(shape, d_out.data(), in.data(), weight.data(), mean.data(), rstd.data(),
                      d_in->data(), d_weight.data(), d_bias.data());
  }
  for (int i = 0; i < 6; ++i) EXPECT_NEAR(from_ten[i], from_zero[i] + 10, 1e-12);
}

TEST(Gelu, BackwardEqualsFiniteDifferences) {
  Values in = RandomValues(64, 1, 2.0);
  const Values d_out = RandomValues(64, 2);
  Values out(64), tanh_u(64), d_in(64);
  const auto f = [&] {
    GeluForward(64, in.data(), out.data(), tanh_u.data());
    return Dot(out, d_out);
  };
  f();
  GeluBackward(64, d_out.data(), in.data(), tanh_u.data(), d_in.data());
  ExpectGradient("in", in, d_in, f);
}

TEST(Gelu, IsZeroOrTheIdentityFarFromZero) {
  const std::vector<float> in = {-1e4f, -30.0f, 30.0f, 1e4f};
  std::vector<float> out(4), tanh_u(4);
  GeluForward(4, in.data(), out.data(), tanh_u.data());
  EXPECT_THAT(out, testing::ElementsAre(0.0f, 0.0f, 30.0f, 1e4f));
}

TEST(Attention, BackwardEqualsFiniteDifferences) {
  const AttentionShape shape{.sequences = 2, .context = 5, .width = 6, .heads = 2};
  Values qkv = RandomValues(2 * 5 * 18, 1);
  const Values d_out = RandomValues(2 * 5 * 6, 2);
  Values out(60), probabilities(2 * 2 * 25), d_qkv(180), scratch(100);
  const auto f = [&] {
    AttentionForward(shape, qkv.data(), probabilities.data(), out.data());
    return Dot(out, d_out);
  };
  f();
  AttentionBackward(shape, d_out.data(), qkv.data(), probabilities.data(), d_qkv.data(),
                    scratch.data());
  ExpectGradient("qkv", qkv, d_qkv, f);
}

TEST(Attention, SeesNoLaterToken) {
  const AttentionShape shape{.sequences = 1, .context = 4, .width = 2, .heads = 1};
  Values qkv = RandomValues(4 * 6, 1);
  Values probabilities(16), before(8), after(8);
  AttentionForward(shape, qkv.data(), probabilities.data(), before.data());
  for (int i = 0; i < 6; ++i) qkv[3 * 6 + i] += 5;  // Only the last token.
  AttentionForward(shape, qkv.data(), probabilities.data(), after.data());
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + 6, after.begin()));
  EXPECT_NE(before[6], after[6]);
}

TEST(CrossEntropy, GradientEqualsFiniteDifferences) {
  const CrossEntropyShape shape{.rows = 3, .classes = 5};
  const std::vector<int32_t> targets = {4, 0, 2};
  Values logits = RandomValues(15, 1, 3.0);
  Values row_losses(3);
  const auto f = [&] {
    Values scratch = logits;
    return CrossEntropy(shape, targets.data(), scratch.data(), row_losses.data());
  };
  Values gradient = logits;
  CrossEntropy(shape, targets.data(), gradient.data(), row_losses.data());
  ExpectGradient("logits", logits, gradient, f);
}

TEST(CrossEntropy, OfUniformLogitsIsTheLogarithmOfTheClasses) {
  std::vector<float> logits(2 * 256, 7.0f);
  std::vector<double> row_losses(2);
  const std::vector<int32_t> targets = {0, 255};
  EXPECT_NEAR(
      CrossEntropy({.rows = 2, .classes = 256}, targets.data(), logits.data(), row_losses.data()),
      2 * std::log(256.0), 1e-6);
}

TEST(Embedding, BackwardEqualsFiniteDifferences) {
  const EmbeddingShape shape{.sequences = 2, .context = 3, .width = 4};
  const std::vector<int32_t> inputs = {0, 2, 2, 1, 0, 2};  // Repeats must add up.
  Values tokens = RandomValues(3 * 4, 1), positions = RandomValues(3 * 4, 2);
  const Values d_out = RandomValues(24, 3);
  Values out(24), d_tokens(12, 0.0), d_positions(12);
  const auto f = [&] {
    EmbeddingForward(shape, inputs.data(), tokens.data(), positions.data(), out.data());
    return Dot(out, d_out);
  };
  EmbeddingBackward(shape, inputs.data(), d_out.data(), d_tokens.data(), d_positions.data());
  ExpectGradient("tokens", tokens, d_tokens, f);
  ExpectGradient("positions", positions, d_positions, f);
}

TEST(Exp, IsWithinItsToleranceOfTheMathLibrary) {
  for (int i = -87000; i <= 88000; i += 7) {
    const float x = i / 1000.0f;
    const double exact = std::exp(static_cast<double>(x));
    ASSERT_NEAR(Exp(x), exact, 2e-7 * exact) << x;
  }
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(Exp(-1000.0f), Exp(-87.0f));
  EXPECT_EQ(Exp(1000.0f), Exp(88.0f));
}

}  // namespace
}  // namespace ballast::worker::cpu
