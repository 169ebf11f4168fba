// A world of more ranks than sequences: those that have none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "gpu_worker/cpu/cpu_backend.h"
#include "gpu_worker/cpu/cpu_gpt.h"
#include "tests/gpu_worker/collective/ranks.h"

namespace ballast::worker {
namespace {

constexpr GptConfig kTiny{.layers = 1, .heads = 1, .width = 16, .context = 4};

struct KeptGradients final : GradientSink {
  absl::Status Push(client::GradientPush push) override {
    std::vector<float>& values = gradients[push.chunk];
    for (size_t e = 0; e < push.payload.size() / sizeof(uint16_t); ++e) {
      values.push_back(LoadElement(push.payload.data(), DType::kBFloat16, e));
    }
    push.released();
    return absl::OkStatus();
  }
  absl::Status EndMicroStep(uint32_t, const UsedParameters& used) override {
    EXPECT_TRUE(used.all) << "the service would refuse the seal";
    ++ended;
    return absl::OkStatus();
  }

  std::map<int, std::vector<float>> gradients;
  int ended = 0;
};

// What a micro-step over `batch` hands over on this rank, by the chunk's place: group and begin.
using Gradients = std::map<std::pair<int, int64_t>, std::vector<float>>;
Gradients GradientsOfAPass(Collective& collective, const Batch& batch) {
  const TrainingJob job =
      MakeTrainingJob(
          GptParameters(kTiny),
          {.world_size = collective.world_size(), .bucket_elements = 1024, .chunk_elements = 256})
          .value();
  KeptGradients kept;
  CpuBackend backend({}, MakeCpuGpt(kTiny), job, collective);
  backend.Start(kept);
  const InitialValues first = [](int parameter, int64_t offset, absl::Span<float> values) {
    GptInitialValues(kTiny, 1, parameter, offset, values);
  };
  for (const int chunk : job.layout.chunks_of_rank(collective.rank())) {
    std::vector<float> values(job.layout.chunks()[chunk].elements);
    FillInitialValues(first, job.layout, chunk, absl::MakeSpan(values));
    for (size_t e = 0; e < values.size(); ++e) {
      StoreElement(backend.weights(chunk).data(), DType::kBFloat16, e, values[e]);
    }
  }
  EXPECT_TRUE(backend.GatherWeights().ok());
  EXPECT_TRUE(backend.MicroStep({.step = 1, .batch = batch}).ok());
  EXPECT_EQ(backend.FinishStep()->loss_sum > 0, batch.sequences > 0);
  EXPECT_EQ(kept.ended, 1);
  Gradients gradients;
  for (auto& [chunk, values] : kept.gradients) {
    const Chunk& of = job.layout.chunks()[chunk];
    gradients[{of.group, of.begin}] = std::move(values);
  }
  return gradients;
}

TEST(RankWithoutTokens, HasReachedAllWithZeros) {
  const Batch some{.sequences = 1, .context = 4, .inputs = {1, 2, 3, 4}, .targets = {2, 3, 4, 5}};
  const Batch none{.sequences = 0, .context = 4, .inputs = {}, .targets = {}};
  Gradients alone, of_rank[2];
  RunRanks(1, [&](Collective& collective) { alone = GradientsOfAPass(collective, some); });
  RunRanks(2, [&](Collective& collective) {
    const int rank = collective.rank();
    of_rank[rank] = GradientsOfAPass(collective, rank == 0 ? some : none);
  });
  EXPECT_FALSE(of_rank[1].empty());
  of_rank[0].merge(of_rank[1]);
  EXPECT_EQ(of_rank[0], alone);
}

}  // namespace
}  // namespace ballast::worker
