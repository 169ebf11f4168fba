// Layer norm and the sums of columns against the CPU model's, in double. What is rounded to bf16 at
// the end may differ by that rounding, 2^-8 relative; fp32 sums of n terms by n 2^-24 of the
// largest they can be, and by far less in fact.
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "gpu_worker/cpu/layer_norm.h"
#include "gpu_worker/cuda/kernels/layer_norm.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

struct Case {
  LayerNormShape shape;
  size_t offset = 0;  // The parameters', in elements: 1 prevents loads of packs.

  size_t elements() const { return shape.rows * shape.width; }
  std::string name() const {
    return absl::StrCat(shape.rows, " x ", shape.width, ", offset ", offset, ": ");
  }
};

const Case kCases[] = {
    {{.rows = 1, .width = 8}},
    {{.rows = 257, .width = 8}},
    {{.rows = 5, .width = 37}},
    {{.rows = 33, .width = 264}, 1},
    {{.rows = 70, .width = 768}},
    {{.rows = 6, .width = 1600}},
    // Parts of more than the fewest rows, the last of them shorter.
    {{.rows = 4100, .width = 16}},
};

class LayerNormKernels : public KernelTest {
 protected:
  struct Forward {
    std::vector<BFloat16Bits> sum, out;
    std::vector<float> mean, rstd;
  };

  Forward RunForward(const Case& c, const std::vector<BFloat16Bits>& x,
                     const std::vector<BFloat16Bits>* residual,
                     const std::vector<BFloat16Bits>& weight,
                     const std::vector<BFloat16Bits>& bias) {
    const auto d_x = Upload(x);
    const auto d_residual = Upload(residual == nullptr ? std::vector<BFloat16Bits>() : *residual);
    const auto d_weight = Upload(weight, c.offset);
    const auto d_bias = Upload(bias, c.offset);
    const auto sum = Poisoned<BFloat16Bits>(residual == nullptr ? 0 : c.elements());
    const auto out = Poisoned<BFloat16Bits>(c.elements());
    const auto mean = Poisoned<float>(c.shape.rows);
    const auto rstd = Poisoned<float>(c.shape.rows);
    Run(LayerNormForward(stream(), c.shape,
                         {.x = d_x.data(),
                          .residual = residual == nullptr ? nullptr : d_residual.data(),
                          .weight = d_weight.data(),
                          .bias = d_bias.data(),
                          .sum = residual == nullptr ? nullptr : sum.data(),
                          .out = out.data(),
                          .mean = mean.data(),
                          .rstd = rstd.data()}));
    return {Download(sum), Download(out), Download(mean), Download(rstd)};
  }

  struct Backward {
    std::vector<BFloat16Bits> d_stream;
    std::vector<float> weight_gradient, bias_gradient;
  };

  // The statistics are what the forward pass would have kept.
  Backward RunBackward(const Case& c, const std::vector<BFloat16Bits>& d_out,
                       const std::vector<BFloat16Bits>& x, const std::vector<BFloat16Bits>& weight,
                       const std::vector<float>& mean, const std::vector<float>& rstd,
                       const std::vector<BFloat16Bits>* before, bool add = false) {
    const auto d_d_out = Upload(d_out);
    const auto d_x = Upload(x);
    const auto d_weight = Upload(weight, c.offset);
    const auto d_mean = Upload(mean);
    const auto d_rstd = Upload(rstd);
    const auto d_stream =
        before == nullptr ? Poisoned<BFloat16Bits>(c.elements()) : Upload(*before);
    const std::vector<float> sevens(c.shape.width, 7.0f);
    const auto weight_gradient =
        add ? Upload(sevens, c.offset) : Poisoned<float>(c.shape.width, c.offset);
    const auto bias_gradient =
        add ? Upload(sevens, c.offset) : Poisoned<float>(c.shape.width, c.offset);
    const auto scratch = Poisoned<float>(LayerNormScratchBytes(c.shape) / sizeof(float));
    Run(LayerNormBackward(stream(), c.shape,
                          {.d_out = d_d_out.data(),
                           .x = d_x.data(),
                           .weight = d_weight.data(),
                           .mean = d_mean.data(),
                           .rstd = d_rstd.data(),
                           .d_stream = d_stream.data(),
                           .assign = before == nullptr,
                           .weight_gradient = weight_gradient.data(),
                           .bias_gradient = bias_gradient.data(),
                           .add = add,
                           .scratch = scratch.data()}));
    return {Download(d_stream), Download(weight_gradient), Download(bias_gradient)};
  }
};

// In double, from the same bits.
struct Reference {
  std::vector<double> out, mean, rstd;
};
Reference ReferenceForward(const Case& c, const std::vector<BFloat16Bits>& x,
                           const std::vector<BFloat16Bits>& weight,
                           const std::vector<BFloat16Bits>& bias) {
  Reference reference{std::vector<double>(c.elements()), std::vector<double>(c.shape.rows),
                      std::vector<double>(c.shape.rows)};
  cpu::LayerNormForward<double>({static_cast<int>(c.shape.rows), c.shape.width},
                                Widen<double>(x).data(), Widen<double>(weight).data(),
                                Widen<double>(bias).data(), reference.out.data(),
                                reference.mean.data(), reference.rstd.data());
  return reference;
}

std::vector<float> ToFloat(const std::vector<double>& values) {
  return std::vector<float>(values.begin(), values.end());
}

TEST_F(LayerNormKernels, ForwardEqualsTheCpuModel) {
  for (const Case& c : kCases) {
    const auto x = RandomBFloat16(c.elements(), 1, 3);
    const auto weight = RandomBFloat16(c.shape.width, 2);
    const auto bias = RandomBFloat16(c.shape.width, 3);
    const Forward forward = RunForward(c, x, nullptr, weight, bias);
    const Reference reference = ReferenceForward(c, x, weight, bias);
    ExpectClose(c.name() + "out", Widen<float>(forward.out), reference.out, kBFloat16Rounding,
                1e-5);
    ExpectClose(c.name() + "mean", forward.mean, reference.mean, 0, 1e-5);
    ExpectClose(c.name() + "rstd", forward.rstd, reference.rstd, 1e-5, 0);
  }
}

TEST_F(LayerNormKernels, ForwardNormalisesTheRoundedSumWithTheResidual) {
  for (const Case& c : kCases) {
    const auto x = RandomBFloat16(c.elements(), 4, 3);
    const auto residual = RandomBFloat16(c.elements(), 5);
    const auto weight = RandomBFloat16(c.shape.width, 6);
    const auto bias = RandomBFloat16(c.shape.width, 7);
    std::vector<float> sum = Widen<float>(x);
    const std::vector<float> added = Widen<float>(residual);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += added[i];

    const Forward forward = RunForward(c, x, &residual, weight, bias);
    EXPECT_EQ(forward.sum, ToBFloat16(sum)) << c.name();
    const Reference reference = ReferenceForward(c, ToBFloat16(sum), weight, bias);
    ExpectClose(c.name() + "out", Widen<float>(forward.out), reference.out, kBFloat16Rounding,
                1e-5);
    ExpectClose(c.name() + "mean", forward.mean, reference.mean, 0, 1e-5);
    ExpectClose(c.name() + "rstd", forward.rstd, reference.rstd, 1e-5, 0);
  }
}

TEST_F(LayerNormKernels, ForwardOfARowThatIsAllEqualIsTheBias) {
  const Case c = {{.rows = 2, .width = 64}};
  const auto bias = RandomBFloat16(64, 8);
  const Forward forward = RunForward(c, std::vector<BFloat16Bits>(128, FloatToBFloat16(5)), nullptr,
                                     RandomBFloat16(64, 9), bias);
  for (size_t i = 0; i < forward.out.size(); ++i) EXPECT_EQ(forward.out[i], bias[i % 64]);
  EXPECT_NEAR(forward.rstd[1], 1 / std::sqrt(1e-5), 1e-2);
}

// A mean far from zero, where the square of the mean less the mean of squares would be noise.
TEST_F(LayerNormKernels, ForwardKeepsTheVarianceOfRowsFarFromZero) {
  const Case c = {{.rows = 3, .width = 768}};
  std::vector<float> x = RandomFloats(c.elements(), 10, 2);
  for (float& value : x) value += 300;
  const auto weight = RandomBFloat16(768, 11), bias = RandomBFloat16(768, 12);
  const Forward forward = RunForward(c, ToBFloat16(x), nullptr, weight, bias);
  const Reference reference = ReferenceForward(c, ToBFloat16(x), weight, bias);
  ExpectClose("out", Widen<float>(forward.out), reference.out, kBFloat16Rounding, 1e-4);
  ExpectClose("rstd", forward.rstd, reference.rstd, 1e-5, 0);
}

TEST_F(LayerNormKernels, BackwardEqualsTheCpuModel) {
  for (const Case& c : kCases) {
    const auto x = RandomBFloat16(c.elements(), 13, 3);
    const auto d_out = RandomBFloat16(c.elements(), 14);
    const auto weight = RandomBFloat16(c.shape.width, 15);
    const auto before = RandomBFloat16(c.elements(), 16);
    const Reference statistics = ReferenceForward(c, x, weight, weight);
    for (const bool assign : {false, true}) {
      const Backward backward = RunBackward(c, d_out, x, weight, ToFloat(statistics.mean),
                                            ToFloat(statistics.rstd), assign ? nullptr : &before);
      std::vector<double> d_x = Widen<double>(before);
      if (assign) d_x.assign(c.elements(), 0.0);
      std::vector<double> d_weight(c.shape.width), d_bias(c.shape.width);
      cpu::LayerNormBackward<double>(
          {static_cast<int>(c.shape.rows), c.shape.width}, Widen<double>(d_out).data(),
          Widen<double>(x).data(), Widen<double>(weight).data(), statistics.mean.data(),
          statistics.rstd.data(), d_x.data(), d_weight.data(), d_bias.data());
      const double sums = 1e-6 * static_cast<double>(c.shape.rows);
      ExpectClose(c.name() + "d_stream", Widen<float>(backward.d_stream), d_x, kBFloat16Rounding,
                  1e-5);
      ExpectClose(c.name() + "weight_gradient", backward.weight_gradient, d_weight, 1e-5, sums);
      ExpectClose(c.name() + "bias_gradient", backward.bias_gradient, d_bias, 1e-5, sums);
    }
  }
}

TEST_F(LayerNormKernels, BackwardRepeatsToTheBit) {
  const Case c = {{.rows = 4100, .width = 16}};
  const auto x = RandomBFloat16(c.elements(), 17), d_out = RandomBFloat16(c.elements(), 18);
  const auto weight = RandomBFloat16(16, 19);
  const Reference statistics = ReferenceForward(c, x, weight, weight);
  const auto run = [&] {
    return RunBackward(c, d_out, x, weight, ToFloat(statistics.mean), ToFloat(statistics.rstd),
                       nullptr);
  };
  const Backward first = run(), second = run();
  EXPECT_EQ(second.d_stream, first.d_stream);
  EXPECT_EQ(second.weight_gradient, first.weight_gradient);
  EXPECT_EQ(second.bias_gradient, first.bias_gradient);
}

TEST_F(LayerNormKernels, GradientsOfParametersAreAddedWhereThatIsAskedFor) {
  const Case c = {.shape = {40, 24}};
  const auto d_out = RandomBFloat16(c.elements(), 21), x = RandomBFloat16(c.elements(), 22);
  const auto weight = RandomBFloat16(24, 23);
  const Reference statistics = ReferenceForward(c, x, weight, weight);
  const auto run = [&](bool add) {
    return RunBackward(c, d_out, x, weight, ToFloat(statistics.mean), ToFloat(statistics.rstd),
                       nullptr, add);
  };
  Backward expected = run(false);
  for (auto* gradient : {&expected.weight_gradient, &expected.bias_gradient}) {
    for (float& element : *gradient) element += 7.0f;
  }
  const Backward added = run(true);
  EXPECT_EQ(added.weight_gradient, expected.weight_gradient);
  EXPECT_EQ(added.bias_gradient, expected.bias_gradient);
  EXPECT_EQ(added.d_stream, expected.d_stream);
}

TEST_F(LayerNormKernels, ColumnSumIsTheSumOfEachColumn) {
  struct Matrix {
    int64_t rows;
    int columns;
  };
  for (const auto [rows, columns] :
       {Matrix{1, 8}, {257, 8}, {40, 37}, {5, 6400}, {4500, 24}, {0, 24}}) {
    const auto d_out = RandomBFloat16(rows * columns, 20);
    const auto on_device = Upload(d_out);
    const auto gradient = Poisoned<float>(columns);
    const auto scratch = Poisoned<float>(ColumnSumScratchBytes(rows, columns) / sizeof(float));
    Run(ColumnSum(stream(), rows, columns, on_device.data(), gradient.data(), /*add=*/false,
                  scratch.data()));
    std::vector<double> expected(columns);
    for (int64_t i = 0; i < rows * columns; ++i) {
      expected[i % columns] += BFloat16ToFloat(d_out[i]);
    }
    ExpectClose(absl::StrCat(rows, " x ", columns), Download(gradient), expected, 1e-5,
                1e-6 * static_cast<double>(rows));
    std::vector<float> twice = Download(gradient);
    for (float& element : twice) element += element;
    Run(ColumnSum(stream(), rows, columns, on_device.data(), gradient.data(), /*add=*/true,
                  scratch.data()));
    EXPECT_EQ(Download(gradient), twice);
  }
}

TEST(ColumnSumScratch, IsNeverLessForMoreRows) {
  for (int64_t rows = 0; rows < 20000; ++rows) {
    ASSERT_LE(ColumnSumScratchBytes(rows, 8), ColumnSumScratchBytes(rows + 1, 8)) << rows;
  }
}

}  // namespace
}  // namespace ballast::worker::cuda
