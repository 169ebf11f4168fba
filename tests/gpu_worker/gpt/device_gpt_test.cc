// Passes of a model, on whatever device the test is linked with.
#include "gpu_worker/gpt/device_gpt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu_worker/cpu/cpu_gpt.h"
#include "tests/gpu_worker/cuda/kernel_test.h"
#include "tests/gpu_worker/gpt/model_on_device.h"
#include "tests/gpu_worker/gpt/test_matmul.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::Each;

constexpr GptConfig kOneHead{.layers = 2, .heads = 1, .width = 64, .context = 16};
constexpr GptConfig kTwoHeads{.layers = 2, .heads = 2, .width = 128, .context = 40};

class DeviceGptPasses : public cuda::KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto matmul = cuda::MakeTestMatmul(device());
    ASSERT_TRUE(matmul.ok()) << matmul.status();
    matmul_ = *std::move(matmul);
  }
  DeviceGptParts parts() { return {device(), stream(), *matmul_}; }

 private:
  std::unique_ptr<DeviceMatmul> matmul_;
};

PassResult OnTheCpu(const GptConfig& config, const Batch& batch) {
  const Layout layout = LayoutOf(config);
  CpuGpt<float> model(config);
  model.Place(layout, {layout.flat_elements(0), layout.flat_elements(1)}, DType::kBFloat16);
  const auto group = [&](size_t p) { return layout.spec().parameters[p].group; };
  const size_t parameters = layout.spec().parameters.size();
  for (size_t p = 0; p < parameters; ++p) {
    const std::vector<uint16_t> weights = SomeWeights(config, p);
    std::copy(weights.begin(), weights.end(),
              reinterpret_cast<uint16_t*>(model.weights(group(p)).data()) + layout.place(p).offset);
  }
  PassResult result;
  result.loss = model.ForwardBackward(batch, 1, [](int) {});
  for (size_t p = 0; p < parameters; ++p) {
    const float* begin = model.gradients(group(p)).data() + layout.place(p).offset;
    result.gradients.emplace_back(begin, begin + layout.place(p).elements);
  }
  return result;
}

double Norm(const std::vector<float>& values) {
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * value;
  return std::sqrt(squares);
}

// The error of gradients, relative to the parameter's norm. Between a weight and its gradient are
// some tens of activations that were rounded to bf16, each off by 2^-9 of itself at most and by
// half of that in the mean; such errors add up like the sides of a right triangle. A term that is
// missing or wrong is off by far more.
constexpr double kGradientTolerance = 0.02;
// The loss is a mean of many rows: their errors all but cancel.
constexpr double kLossTolerance = 2e-3;

void ExpectClose(const GptConfig& config, const PassResult& actual, const PassResult& expected) {
  EXPECT_NEAR(actual.loss, expected.loss, kLossTolerance * expected.loss);
  const std::vector<ModelParameter> parameters = GptParameters(config);
  for (size_t p = 0; p < parameters.size(); ++p) {
    std::vector<float> error = actual.gradients[p];
    for (size_t i = 0; i < error.size(); ++i) error[i] -= expected.gradients[p][i];
    const double norm = Norm(expected.gradients[p]);
    ASSERT_GT(norm, 0) << parameters[p].name;
    EXPECT_LE(Norm(error) / norm, kGradientTolerance) << parameters[p].name;
  }
}

TEST_F(DeviceGptPasses, LossAndEveryGradientAreTheCpuModelsWithinRounding) {
  for (const GptConfig& config : {kOneHead, kTwoHeads}) {
    ModelOnDevice on(config, parts(), 3);
    const Batch batch = SomeBatch(config, 3, config.context);
    ExpectClose(config, on.Pass(batch), OnTheCpu(config, batch));
  }
}

TEST_F(DeviceGptPasses, DoesShorterSequencesAndFewerOfThem) {
  ModelOnDevice on(kTwoHeads, parts(), 4);
  for (const auto& [sequences, context] : {std::pair(4, 40), {3, 17}, {1, 40}, {1, 1}, {4, 40}}) {
    const Batch batch = SomeBatch(kTwoHeads, sequences, context);
    const PassResult result = on.Pass(batch);
    if (context > 1) {  // Else the gradients of queries and keys are nothing but rounding.
      ExpectClose(kTwoHeads, result, OnTheCpu(kTwoHeads, batch));
    }
    ModelOnDevice fresh(kTwoHeads, parts(), 4);
    EXPECT_TRUE(result == fresh.Pass(batch)) << sequences << " x " << context;
    EXPECT_THAT(absl::MakeSpan(result.gradients[kPositionEmbedding]).subspan(context * 128),
                Each(0.0f));
  }
}

TEST_F(DeviceGptPasses, SameBitsInEveryRun) {
  const Batch batch = SomeBatch(kTwoHeads, 3, 40);
  ModelOnDevice on(kTwoHeads, parts(), 3);
  const PassResult first = on.Pass(batch);
  EXPECT_TRUE(on.Pass(batch) == first);
  ModelOnDevice other(kTwoHeads, parts(), 3);
  EXPECT_TRUE(other.Pass(batch) == first);
}

TEST_F(DeviceGptPasses, NothingThatWasThereBeforeGetsIntoAPass) {
  const Batch batch = SomeBatch(kOneHead, 2, 16);
  ModelOnDevice on(kOneHead, parts(), 2);
  const PassResult expected = on.Pass(batch);
  // All activations become NaN, and with them all gradients.
  on.PoisonWeights();
  for (const std::vector<float>& gradient : on.Pass(batch).gradients) {
    ASSERT_TRUE(
        std::any_of(gradient.begin(), gradient.end(), [](float g) { return std::isnan(g); }));
  }
  for (int p = 0; p < on.parameters(); ++p) on.SetWeights(p, SomeWeights(kOneHead, p));
  on.PoisonGradients();
  EXPECT_TRUE(on.Pass(batch) == expected);
}

TEST_F(DeviceGptPasses, AnEmptyBatchWritesZerosAndReadsNoWeights) {
  ModelOnDevice on(kOneHead, parts(), 2);
  on.PoisonWeights();
  on.Pass(SomeBatch(kOneHead, 2, 16));  // Something that must not stay.
  std::vector<int> read, written, ready;
  const auto note = [](std::vector<int>& in) {
    return [&in](int p) {
      in.push_back(p);
      return absl::OkStatus();
    };
  };
  ExpectOk(on.model().ForwardBackward(Batch{.context = 16}, {}, on.loss(),
                                      {.before_weights = note(read),
                                       .before_gradient = note(written),
                                       .gradient_ready = note(ready)}));
  const PassResult result = on.Result();
  EXPECT_EQ(result.loss, 0);
  for (const std::vector<float>& gradient : result.gradients) EXPECT_THAT(gradient, Each(0.0f));
  EXPECT_THAT(read, testing::IsEmpty());
  EXPECT_EQ(ready, GptBackwardOrder(kOneHead));
  EXPECT_EQ(written, ready);
}

TEST_F(DeviceGptPasses, AddsTheLossUnlessItIsTheFirst) {
  ModelOnDevice on(kOneHead, parts(), 2);
  const Batch one = SomeBatch(kOneHead, 2, 16), other = SomeBatch(kOneHead, 1, 9, 11);
  const double loss = on.Pass(one).loss, more = on.Pass(other).loss;
  ASSERT_GT(loss, 0);
  ASSERT_NE(loss, more);
  on.Pass(one);
  for (const Batch& batch : {other, Batch{}}) {
    ExpectOk(on.model().ForwardBackward(batch, {.add_loss = true}, on.loss(), {}));
  }
  EXPECT_EQ(on.Result().loss, loss + more);
}

TEST_F(DeviceGptPasses, AddsGradientsToThoseThatAreThereWhereThatIsAskedFor) {
  // The second is shorter: positions past it keep their gradient. The third has none.
  const Batch one = SomeBatch(kOneHead, 2, 16), other = SomeBatch(kOneHead, 1, 12);
  ModelOnDevice on(kOneHead, parts(), 2);
  const PassResult first = on.Pass(one), second = on.Pass(other);
  on.Pass(one);
  for (const Batch& batch : {other, Batch{}}) {
    ExpectOk(on.model().ForwardBackward(batch, {.add_gradients = true}, on.loss(), {}));
  }
  const PassResult sum = on.Result();
  for (size_t p = 0; p < sum.gradients.size(); ++p) {
    for (size_t i = 0; i < sum.gradients[p].size(); ++i) {
      // The same roundings in fp32, except where a gradient itself is of two parts.
      const float a = first.gradients[p][i], b = second.gradients[p][i];
      ASSERT_NEAR(sum.gradients[p][i], a + b, 1e-5f * (std::abs(a) + std::abs(b)) + 1e-6f)
          << "parameter " << p << " element " << i;
    }
  }
}

// A power of two moves no rounding, as long as nothing overflows or underflows.
TEST_F(DeviceGptPasses, TheLossScaleMultipliesEveryGradientAndNotTheLoss) {
  const Batch batch = SomeBatch(kOneHead, 2, 16);
  ModelOnDevice on(kOneHead, parts(), 2);
  PassResult expected = on.Pass(batch);
  for (std::vector<float>& gradient : expected.gradients) {
    for (float& element : gradient) element *= 1024;
  }
  const PassResult scaled = on.Pass(batch, 1024);
  EXPECT_EQ(scaled.loss, expected.loss);
  for (size_t p = 0; p < expected.gradients.size(); ++p) {
    EXPECT_EQ(scaled.gradients[p], expected.gradients[p]) << GptParameters(kOneHead)[p].name;
  }
}

TEST_F(DeviceGptPasses, RefusesABatchBeyondItsMemoryOrItsVocabulary) {
  ModelOnDevice on(kOneHead, parts(), 2);
  int events = 0;
  const auto expect_refused = [&](const Batch& batch) {
    const auto count = [&](int) {
      ++events;
      return absl::OkStatus();
    };
    EXPECT_TRUE(Refused(on.model().ForwardBackward(batch, {}, on.loss(), {count, count, count}),
                        absl::StatusCode::kInvalidArgument));
  };
  expect_refused(SomeBatch(kOneHead, 3, 16));
  expect_refused(SomeBatch(kOneHead, 1, 17));
  Batch strange = SomeBatch(kOneHead, 1, 16);
  strange.inputs[3] = 256;
  expect_refused(strange);
  strange = SomeBatch(kOneHead, 1, 16);
  strange.targets[15] = -1;
  expect_refused(strange);
  EXPECT_EQ(events, 0);
}

TEST_F(DeviceGptPasses, SaysWhatItTakesOfTheDevice) {
  const auto create = [&](int sequences) {
    return DeviceGpt::Create(kTwoHeads, parts(), sequences).value();
  };
  const int64_t before = device().allocated_bytes();
  int64_t one = 0;
  {
    const std::unique_ptr<DeviceGpt> model = create(1);
    one = model->activation_bytes();
    EXPECT_EQ(device().allocated_bytes(), before + one);
  }
  EXPECT_EQ(device().allocated_bytes(), before);
  const std::unique_ptr<DeviceGpt> model = create(2);
  EXPECT_EQ(device().allocated_bytes(), before + model->activation_bytes());
  // A block keeps 16 tensors of bf16 as wide as the model for each token.
  const int64_t kept = 2 * int64_t{16} * 128 * sizeof(uint16_t) * 40;
  EXPECT_GT(model->activation_bytes() - one, kept);
  EXPECT_LT(model->activation_bytes() - one, 2 * kept);
}

TEST_F(DeviceGptPasses, RefusesShapesThatTheKernelsDoNotHave) {
  const auto code = [&](const GptConfig& config) {
    return DeviceGpt::Create(config, parts(), 1).status().code();
  };
  EXPECT_EQ(code({.layers = 1, .heads = 4, .width = 128}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.layers = 0, .heads = 1, .width = 64}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.layers = 1, .heads = 1, .width = 128}), absl::StatusCode::kOk);
}

TEST_F(DeviceGptPasses, CountsTheOperationsOfItsProducts) {
  const auto model = DeviceGpt::Create(kOneHead, parts(), 1).value();
  // Forward, in multiplications and additions: two blocks and the head for 16 tokens; q . k and
  // p v for the 136 pairs of a query and a key that it sees.
  const double forward = 2.0 * 16 * (2 * 12 * 64 * 64 + 256 * 64) + 2.0 * 2 * (2 * 64 * 136);
  EXPECT_EQ(model->FloatingPointOperations(1), 3 * forward);
  EXPECT_EQ(model->FloatingPointOperations(5), 15 * forward);
}

}  // namespace
}  // namespace ballast::worker
