#include "gpu_worker/cpu/cpu_gpt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <cmath>

#include "cpu_optimizer_service/common/float_format.h"
#include "gpu_worker/base/random.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {
namespace {

constexpr GptConfig kTiny{.layers = 2, .heads = 2, .width = 8, .context = 6};

// A placed model whose weights are all random, biases and layer norms included, so that no term of
// a gradient hides behind a zero.
template <typename T>
struct Placed {
  explicit Placed(const GptConfig& config = kTiny, float bias_scale = 0.3f)
      : parameters(GptParameters(config)),
        model(config),
        job(MakeTrainingJob(parameters, {}).value()) {
    model.Place(job.layout, job.group_elements, DType::kBFloat16);
    for (size_t p = 0; p < parameters.size(); ++p) {
      std::vector<float> values(job.layout.place(p).elements);
      GptInitialValues(config, 3, p, 0, absl::MakeSpan(values));
      const bool vector = parameters[p].shape.size() == 1;
      for (size_t i = 0; i < values.size(); ++i) {
        const float noise = RandomNormal(5, p, i);
        Weight(p, i) = FloatToBFloat16(vector ? values[i] + bias_scale * noise : 0.3f * noise);
      }
    }
  }

  uint16_t& Weight(int p, int64_t i) {
    const absl::Span<std::byte> weights = model.weights(job.spec.layout.parameters[p].group);
    return reinterpret_cast<uint16_t*>(weights.data())[job.layout.place(p).offset + i];
  }
  std::vector<float> Gradient(int p) {
    const auto all = model.gradients(job.spec.layout.parameters[p].group);
    const auto begin = all.begin() + job.layout.place(p).offset;
    return {begin, begin + job.layout.place(p).elements};
  }
  double Loss(const Batch& batch) {
    return model.ForwardBackward(batch, 1, [](int) {});
  }

  const std::vector<ModelParameter> parameters;
  CpuGpt<T> model;
  TrainingJob job;
};

Batch SomeBatch(int sequences, int context) {
  Batch batch{.sequences = sequences, .context = context, .inputs = {}, .targets = {}};
  for (int i = 0; i < sequences * context; ++i) {
    batch.inputs.push_back(static_cast<int32_t>(RandomBits(9, 1, i) % 7));
    batch.targets.push_back(static_cast<int32_t>(RandomBits(9, 2, i) % 7));
  }
  return batch;
}

// In double, weights moved by one and by two bf16 steps h to both sides. h is about 2^-8 of the
// weight, too much for a plain central difference; (4 D(h) - D(2h)) / 3 cancels its h^2 error and
// leaves h^4. 2e-5 of the parameter's largest gradient leaves room for that and for the fp32 in
// which gradients are kept; a wrong or missing term is off by far more.
TEST(CpuGpt, EveryGradientEqualsFiniteDifferences) {
  Placed<double> gpt;
  const Batch batch = SomeBatch(3, 6);
  gpt.Loss(batch);
  std::vector<std::vector<float>> gradients;
  for (size_t p = 0; p < gpt.parameters.size(); ++p) gradients.push_back(gpt.Gradient(p));

  for (size_t p = 0; p < gradients.size(); ++p) {
    const std::string& name = gpt.parameters[p].name;
    float largest = 0;
    for (const float g : gradients[p]) largest = std::max(largest, std::abs(g));
    ASSERT_GT(largest, 0) << name;
    // Most rows of the token embedding are of bytes that the batch does not have.
    const size_t stride = p == 0 ? 11 : std::max<size_t>(1, gradients[p].size() / 40);
    int compared = 0;
    for (size_t i = 0; i < gradients[p].size(); i += stride) {
      uint16_t& weight = gpt.Weight(p, i);
      const uint16_t saved = weight;
      // Steps are even only within one power of two.
      constexpr uint16_t kMantissa = 0x7f;
      if ((saved & kMantissa) < 2 || (saved & kMantissa) > kMantissa - 2) continue;
      const auto difference = [&](int steps) {
        weight = saved + steps;
        const double far = BFloat16ToFloat(weight), above = gpt.Loss(batch);
        weight = saved - steps;
        const double near = BFloat16ToFloat(weight), below = gpt.Loss(batch);
        weight = saved;
        return (above - below) / (far - near);
      };
      ASSERT_NEAR(gradients[p][i], (4 * difference(1) - difference(2)) / 3, 2e-5 * largest)
          << name << " element " << i;
      ++compared;
    }
    EXPECT_GE(compared, 6) << name;
  }
}

TEST(CpuGpt, Fp32ArithmeticAgreesWithDouble) {
  Placed<float> single;
  Placed<double> exact;
  const Batch batch = SomeBatch(3, 6);
  const double loss = exact.Loss(batch);
  EXPECT_NEAR(single.Loss(batch), loss, 1e-6 * loss);
  for (size_t p = 0; p < single.parameters.size(); ++p) {
    const std::vector<float> expected = exact.Gradient(p);
    float largest = 0;
    for (const float g : expected) largest = std::max(largest, std::abs(g));
    EXPECT_THAT(single.Gradient(p),
                testing::Pointwise(testing::FloatNear(2e-5f * largest), expected))
        << single.parameters[p].name;
  }
}

TEST(CpuGpt, SameBitsForAnyNumberOfThreadsAndFromRunToRun) {
  constexpr GptConfig kWide{.layers = 2, .heads = 4, .width = 64, .context = 32};
  const Batch batch = SomeBatch(9, 32);
  std::vector<std::vector<float>> first;
  double first_loss = 0;
  for (const int threads : {1, 1, 2, 5}) {
    const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, threads);
    Placed<float> gpt(kWide);
    const double loss = gpt.Loss(batch);
    for (size_t p = 0; p < gpt.parameters.size(); ++p) {
      if (first.size() <= p) first.push_back(gpt.Gradient(p));
      ASSERT_EQ(gpt.Gradient(p), first[p]) << threads << " " << gpt.parameters[p].name;
    }
    if (first_loss == 0) first_loss = loss;
    EXPECT_EQ(loss, first_loss);
  }
}

TEST(CpuGpt, AnnouncesEachParameterOnceInBackwardOrder) {
  Placed<float> gpt;
  for (const int sequences : {2, 0}) {
    std::vector<int> announced;
    gpt.model.ForwardBackward(SomeBatch(sequences, 6), 1, [&](int p) { announced.push_back(p); });
    EXPECT_EQ(announced, gpt.model.backward_order());
  }
  std::vector<int> sorted = gpt.model.backward_order();
  std::sort(sorted.begin(), sorted.end());
  for (size_t p = 0; p < gpt.parameters.size(); ++p) EXPECT_EQ(sorted[p], p);
}

TEST(CpuGpt, LeavesAnAnnouncedGradientAlone) {
  Placed<float> gpt;
  std::vector<std::vector<float>> when_announced(gpt.parameters.size());
  gpt.model.ForwardBackward(SomeBatch(2, 6), 1,
                            [&](int p) { when_announced[p] = gpt.Gradient(p); });
  for (size_t p = 0; p < when_announced.size(); ++p) {
    EXPECT_EQ(gpt.Gradient(p), when_announced[p]) << gpt.parameters[p].name;
  }
}

TEST(CpuGpt, NoSequencesGiveZeroGradients) {
  Placed<float> gpt;
  gpt.Loss(SomeBatch(2, 6));  // Something that must not stay.
  EXPECT_EQ(gpt.Loss(SomeBatch(0, 6)), 0);
  for (size_t p = 0; p < gpt.parameters.size(); ++p) {
    EXPECT_THAT(gpt.Gradient(p), testing::Each(0.0f));
  }
}

TEST(CpuGpt, TheLossScaleMultipliesEveryGradientExactly) {
  Placed<float> gpt, scaled;
  const double scale = 1 << 20;
  const double loss = gpt.Loss(SomeBatch(2, 6));
  EXPECT_EQ(scaled.model.ForwardBackward(SomeBatch(2, 6), scale, [](int) {}), loss);
  for (size_t p = 0; p < gpt.parameters.size(); ++p) {
    std::vector<float> expected = gpt.Gradient(p);
    for (float& gradient : expected) gradient *= scale;
    EXPECT_EQ(scaled.Gradient(p), expected) << gpt.parameters[p].name;
  }
}

TEST(CpuGpt, ComputesWithTheWeightsThatItsFormatHolds) {
  Placed<float> bf16;
  const double loss = bf16.Loss(SomeBatch(2, 6));
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    CpuGpt<float> model(kTiny);
    model.Place(bf16.job.layout, bf16.job.group_elements, dtype);
    EXPECT_EQ(model.weights_dtype(), dtype);
    for (size_t p = 0; p < bf16.parameters.size(); ++p) {
      const int group = bf16.job.spec.layout.parameters[p].group;
      const ParameterPlace& place = bf16.job.layout.place(p);
      for (int64_t i = 0; i < place.elements; ++i) {
        // bf16 values of this size have an exact fp16, except for small ones.
        const float weight = BFloat16ToFloat(bf16.Weight(p, i));
        StoreElement(model.weights(group).data(), dtype, place.offset + i, weight);
      }
    }
    EXPECT_NEAR(model.ForwardBackward(SomeBatch(2, 6), 1, [](int) {}), loss,
                dtype == DType::kFloat32 ? 0 : 1e-4 * loss);
  }
}

TEST(CpuGpt, BatchesOfChangingSizeDoNotDisturbEachOther) {
  Placed<float> gpt;
  Placed<float> fresh;
  gpt.Loss(SomeBatch(4, 6));
  gpt.Loss(SomeBatch(1, 3));
  EXPECT_EQ(gpt.Loss(SomeBatch(3, 5)), fresh.Loss(SomeBatch(3, 5)));
  for (size_t p = 0; p < gpt.parameters.size(); ++p) {
    EXPECT_EQ(gpt.Gradient(p), fresh.Gradient(p)) << gpt.parameters[p].name;
  }
}

TEST(RandomNormal, HasMeanZeroAndVarianceOne) {
  double sum = 0, squares = 0;
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    const double x = RandomNormal(1, 2, i);
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kDraws, 0, 0.02);
  EXPECT_NEAR(squares / kDraws, 1, 0.02);
}

}  // namespace
}  // namespace ballast::worker
