#include "gpu_worker/training/scalar_arithmetic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/rules/adam.h"

namespace ballast::worker {
namespace {

using testing::Each;

// One chunk of two blocks, gradients in fp16, weights in bf16.
class Chunked {
 public:
  Chunked()
      : layout_(Layout::Create(Spec()).value()),
        arithmetic_(
            {{.name = "g", .wire_dtype = DType::kFloat16, .return_dtype = DType::kBFloat16}},
            layout_, [this](int) { return absl::MakeSpan(weights_); }) {
    EXPECT_TRUE(arithmetic_.SetFirstWeights(0, std::vector<float>(kElements, 1.0f)).ok());
  }

  // Every element of the payload is `value`.
  void Add(bool first, float value) {
    std::vector<std::byte> payload(kElements * SizeBytes(DType::kFloat16));
    for (int64_t e = 0; e < kElements; ++e) {
      StoreElement(payload.data(), DType::kFloat16, e, value);
    }
    int released = 0;
    EXPECT_TRUE(
        arithmetic_
            .AddGradients(
                {{.chunk = 0, .first = first, .payload = payload, .released = [&] { ++released; }}})
            .ok());
    EXPECT_EQ(released, 1);
  }
  // The two blocks' gradients.
  std::vector<double> Sums() {
    std::vector<double> sums(2, -1);
    const BlocksInChunks all{.chunk = 0, .begin = 0, .elements = kElements};
    EXPECT_TRUE(arithmetic_.BlockSums({all}, absl::MakeSpan(sums)).ok());
    EXPECT_TRUE(arithmetic_.Finish().ok());
    return sums;
  }
  std::vector<float> Weights() const {
    std::vector<float> weights;
    for (int64_t e = 0; e < kElements; ++e) {
      weights.push_back(LoadElement(weights_.data(), DType::kBFloat16, e));
    }
    return weights;
  }
  ScalarArithmetic& arithmetic() { return arithmetic_; }

  static constexpr int64_t kElements = 2 * kBlockElements;

 private:
  static LayoutSpec Spec() {
    LayoutSpec spec;
    spec.parameters = {{.name = "p", .shape = {kElements}}};
    spec.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = kElements}};
    return spec;
  }

  const Layout layout_;
  std::vector<std::byte> weights_ = std::vector<std::byte>(kElements * 2);
  ScalarArithmetic arithmetic_;
};

TEST(ScalarArithmetic, TheFirstGradientOfAStepAssignsAndOthersAdd) {
  Chunked chunk;
  chunk.Add(true, 2);
  chunk.Add(false, 1);
  EXPECT_THAT(chunk.Sums(), Each(kBlockElements * 9.0));
  chunk.Add(true, 1);
  EXPECT_THAT(chunk.Sums(), Each(kBlockElements * 1.0));
  ASSERT_TRUE(chunk.arithmetic().ZeroGradient(0).ok());
  EXPECT_THAT(chunk.Sums(), Each(0.0));
}

TEST(ScalarArithmetic, UpdatesTheElementsThatItIsToldAlone) {
  Chunked chunk;
  chunk.Add(true, 4);
  const HyperParameters values{.lr = 0.25, .weight_decay = 0};
  ASSERT_TRUE(chunk.arithmetic().Update(0, 100, 50, MakeAdamScalars(values, 1, 1.0f)).ok());
  const std::vector<float> weights = chunk.Weights();
  for (int64_t e = 0; e < Chunked::kElements; ++e) {
    // The first step of Adam is lr against the gradient's sign.
    const bool updated = e >= 100 && e < 150;
    EXPECT_NEAR(weights[e], updated ? 0.75 : 1, 1.0 / 256) << e;
  }
}

TEST(ScalarArithmetic, FirstWeightsAreRoundedAndForgetWhatWas) {
  Chunked chunk, fresh;
  const AdamScalars scalars = MakeAdamScalars(HyperParameters{.lr = 0.25}, 1, 1.0f);
  chunk.Add(true, 4);
  ASSERT_TRUE(chunk.arithmetic().Update(0, 0, Chunked::kElements, scalars).ok());
  for (Chunked* c : {&chunk, &fresh}) {
    const float value = 1 + 1.0f / 1024;  // Between two bf16.
    const std::vector<float> values(Chunked::kElements, value);
    ASSERT_TRUE(c->arithmetic().SetFirstWeights(0, values).ok());
    EXPECT_THAT(c->Weights(), Each(BFloat16ToFloat(FloatToBFloat16(value))));
    EXPECT_THAT(c->Sums(), Each(0.0));
    c->Add(true, 1);
    ASSERT_TRUE(c->arithmetic().Update(0, 0, Chunked::kElements, scalars).ok());
  }
  EXPECT_EQ(chunk.Weights(), fresh.Weights());
}

}  // namespace
}  // namespace ballast::worker
