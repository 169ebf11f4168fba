// P7: given the same reduced gradients, state, norms and checkpoints are the same to the bit
// however parameters are sharded over ranks.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;

constexpr Placement kReplicate;
constexpr Placement kShard0 = {.shard_dim = 0};
constexpr Placement kShard1 = {.shard_dim = 1};

struct Sharding {
  std::string name;
  int world_size = 1;
  std::vector<MeshDim> mesh;          // Empty: buckets.
  std::vector<Placement> placements;  // Of parameters that have these dimensions; the others, and
                                      // what they have not, are replicated.
};

const std::vector<Sharding>& Shardings() {
  static const auto& shardings = *new std::vector<Sharding>{
      {.name = "one-rank"},
      {.name = "buckets-3", .world_size = 3},
      {.name = "rows-2", .world_size = 2, .mesh = {{"dp", 2}}, .placements = {kShard0}},
      {.name = "rows-3", .world_size = 3, .mesh = {{"dp", 3}}, .placements = {kShard0}},
      {.name = "rows-4", .world_size = 4, .mesh = {{"dp", 4}}, .placements = {kShard0}},
      {.name = "columns-2", .world_size = 2, .mesh = {{"tp", 2}}, .placements = {kShard1}},
      {.name = "replicas-2x2",
       .world_size = 4,
       .mesh = {{"replicate", 2}, {"shard", 2}},
       .placements = {kReplicate, kShard0}},
      {.name = "rows-and-columns-2x2",
       .world_size = 4,
       .mesh = {{"dp", 2}, {"tp", 2}},
       .placements = {kShard0, kShard1}},
  };
  return shardings;
}

JobSpec Spec(const Sharding& sharding, int64_t chunk_elements = kMaxChunkElements,
             UpdateMode mode = UpdateMode::kWait) {
  JobSpec spec;
  spec.name = sharding.name;
  spec.groups = {{.name = "bf16", .wire_dtype = DType::kBFloat16},
                 {.name = "nothing"},
                 {.name = "fp32", .wire_dtype = DType::kFloat32, .return_dtype = DType::kFloat32}};
  spec.groups[2].hyper_parameters.amsgrad = true;
  spec.update_mode = mode;
  LayoutSpec& layout = spec.layout;
  layout.world_size = sharding.world_size;
  layout.group_count = 3;
  layout.chunk_elements = chunk_elements;
  layout.mesh = sharding.mesh;
  layout.parameters = {{.name = "embedding", .shape = {37, 300}},
                       {.name = "bias", .shape = {77}},
                       {.name = "empty", .shape = {0, 4}},
                       {.name = "wide", .shape = {5, 1024}},
                       {.name = "nothing", .shape = {0}, .group = 1},
                       {.name = "scale", .shape = {}, .group = 2},
                       {.name = "cube", .shape = {3, 50, 7}, .group = 2},
                       {.name = "frozen", .shape = {9}, .trainable = false}};
  if (sharding.mesh.empty()) {
    layout.partitions = PartitionsOf(MakeBuckets(FlatElements(layout), sharding.world_size, 4096),
                                     sharding.world_size);
    return spec;
  }
  for (ParameterSpec& parameter : layout.parameters) {
    if (!parameter.trainable) continue;
    for (const Placement& placement : sharding.placements) {
      const bool fits = placement.shard_dim < static_cast<int>(parameter.shape.size());
      parameter.placements.push_back(fits ? placement : kReplicate);
    }
  }
  return spec;
}

// Steps whose gradients are clipped; what was seen of their norms.
std::vector<double> Train(JobDriver& driver, int first_step, int steps) {
  std::vector<double> norms;
  for (int step = first_step; step < first_step + steps; ++step) {
    const StepOutcome outcome =
        driver.Step(100 * step, 1 + step % 2, {.scale = {.loss_scale = 2, .divisors = {3, 1, 6}}});
    EXPECT_LT(outcome.decision.clip_coefficient, 1.0);
    norms.push_back(outcome.decision.norm);
  }
  return norms;
}

class ShardingTest : public testing::Test {
 protected:
  ShardingTest() : root_(fs::path(testing::TempDir()) / ("sharding" + std::to_string(getpid()))) {
    fs::create_directories(root_);
  }
  ~ShardingTest() override { fs::remove_all(root_); }

  JobDriver Make(const JobSpec& spec, Sending sending = Sending::kPayload) {
    JobDriver driver(engine_, spec);
    driver.UploadWeights();
    driver.SetMaxNorm(1.0);
    driver.SetSending(sending);
    driver.AttachAll();
    return driver;
  }

  const fs::path root_;
  Engine engine_{{.memory_limit_bytes = int64_t{256} << 20, .threads = 2}};
};

TEST_F(ShardingTest, ACheckpointOfEachLoadsIntoEach) {
  std::string saved_state;
  std::string later_state;
  for (const Sharding& sharding : Shardings()) {
    JobDriver driver = Make(Spec(sharding, 512));
    Train(driver, 0, 1);
    ASSERT_TRUE(driver.job().Save((root_ / sharding.name).string()).ok());
    saved_state = driver.job().StateHash();
    Train(driver, 1, 1);
    later_state = driver.job().StateHash();
    driver.DetachAll();
  }
  for (const Sharding& sharding : Shardings()) {
    JobSpec spec = Spec(sharding, 1024);
    spec.name = "into-" + sharding.name;
    JobDriver driver(engine_, spec);
    driver.SetMaxNorm(1.0);
    for (const Sharding& from : Shardings()) {
      ASSERT_TRUE(driver.job().Load((root_ / from.name).string()).ok());
      EXPECT_EQ(driver.job().StateHash(), saved_state) << from.name << " " << spec.name;
    }
    driver.AttachAll();
    Train(driver, 1, 1);
    EXPECT_EQ(driver.job().StateHash(), later_state) << spec.name;
  }
}

TEST_F(ShardingTest, StateIsReadByNameInRowMajorOrder) {
  JobDriver driver = Make(Spec(Shardings()[5], 256));
  ASSERT_EQ(driver.layout().has_mesh(), true);
  const int wide = driver.layout().FindParameter("wide");
  const Snapshot snapshot = driver.job().TakeSnapshot({wide}).value();
  std::vector<float> piece(2000);
  snapshot.Read(wide, Plane::kMaster, 300, absl::MakeSpan(piece));
  for (int64_t i = 0; i < 2000; ++i) {
    ASSERT_EQ(piece[i], TestValue(1, 0, 37 * 300 + 77 + 300 + i)) << i;
  }
}

TEST_F(ShardingTest, AGradientThatIsNotFiniteIsNamedByItsPlaceInTheWholeParameter) {
  for (const Sharding& sharding : Shardings()) {
    JobDriver driver = Make(Spec(sharding, 256));
    const std::string before = driver.job().StateHash();
    driver.BeginAll();
    driver.SendAllWith(NAN, 0, 37 * 300 + 77 + 3 * 1024 + 700, 2, 0);
    driver.EndMicroStepAll(0);
    driver.SealAll(1);
    const StepOutcome outcome = driver.listener(0).outcomes().back();
    EXPECT_FALSE(outcome.decision.apply);
    EXPECT_TRUE(Says(outcome.skip_reason));
    EXPECT_EQ(driver.job().StateHash(), before) << sharding.name;
  }
}

// P10. Of two elements the first one is named, in the parameter's own order: the others come first
// in a rank's shard of columns, in a chunk, and from cause to effect.
TEST_F(ShardingTest, AnUpdateThatIsNotFiniteIsNamedByItsPlaceInTheWholeParameter) {
  std::string expected_state;
  for (const int64_t chunk_elements : {kMaxChunkElements, int64_t{256}}) {
    for (const Sharding& sharding : Shardings()) {
      JobSpec spec = Spec(sharding, chunk_elements);
      spec.name += std::to_string(chunk_elements);
      JobDriver driver = Make(spec);
      driver.SetMaxNorm(0);
      const Layout& layout = driver.layout();
      const int wide = layout.FindParameter("wide");
      const auto step = [&](float at_900, float at_1024) {
        driver.BeginAll({.scale = {.divisors = {0.5, 0.5, 0.5}}});
        std::vector<std::vector<float>> values;
        for (int c = 0; c < static_cast<int>(layout.chunks().size()); ++c) {
          values.push_back(driver.Values(c, 2));
        }
        const auto set = [&](int64_t element, float value) {
          layout.VisitRange(wide, element, element + 1, [&](const ChunkPiece& piece) {
            values[piece.chunk][piece.chunk_offset] = value;
          });
        };
        set(900, at_900);
        set(1024, at_1024);
        for (int c = 0; c < static_cast<int>(layout.chunks().size()); ++c) {
          ASSERT_TRUE(driver.Send(c, values[c], 0, /*final=*/true).ok());
        }
        driver.EndMicroStepAll(0);
        driver.SealAll(1);
      };
      const std::string before = driver.job().StateHash();
      step(1e21f, 3e38f);
      const StepOutcome outcome = driver.listener(0).outcomes().back();
      EXPECT_FALSE(outcome.decision.apply);
      EXPECT_TRUE(Says(outcome.skip_reason));
      EXPECT_EQ(driver.job().StateHash(), before) << spec.name;
      step(1, 1);
      EXPECT_TRUE(driver.listener(0).outcomes().back().decision.apply);
      const std::string state = driver.job().StateHash();
      if (expected_state.empty()) expected_state = state;
      EXPECT_EQ(state, expected_state) << spec.name;
    }
  }
}

TEST_F(ShardingTest, AFirstWeightThatIsNotFiniteIsNamedByItsPlaceInTheWholeParameter) {
  for (const Sharding& sharding : Shardings()) {
    JobDriver driver(engine_, Spec(sharding, 256));
    const int wide = driver.layout().FindParameter("wide");
    driver.layout().VisitRange(wide, 3772, 3773, [&](const ChunkPiece& piece) {
      std::vector<float> weights = driver.Values(piece.chunk, 1);
      weights[piece.chunk_offset] = NAN;
      const auto bytes = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(weights.data()),
                                             weights.size() * sizeof(float));
      EXPECT_TRUE(Refused(driver.job().WriteInitialWeights(piece.chunk, {bytes}),
                          absl::StatusCode::kInvalidArgument))
          << sharding.name;
    });
  }
}

TEST_F(ShardingTest, ShardsThatDoNotFitInMemoryAreRefusedBeforeTheyAreLaidOut) {
  JobSpec spec = Spec(Shardings()[2]);
  spec.layout.world_size = 1 << 16;
  spec.layout.mesh = {{"dp", 1 << 16}};
  for (int i = 0; i < 40; ++i) {
    spec.layout.parameters.push_back(
        {.name = std::to_string(i), .shape = {1}, .placements = {kReplicate}});
  }
  EXPECT_TRUE(Refused(engine_.CreateJob(spec), absl::StatusCode::kResourceExhausted));
}

TEST_F(ShardingTest, PaddingBetweenShardsMustBeZero) {
  JobDriver driver(engine_, Spec(Shardings()[3]));
  const ChunkPiece padding = driver.layout().padding().front();
  ASSERT_LT(padding.chunk_offset + padding.elements,
            driver.layout().chunks()[padding.chunk].elements);
  std::vector<float> weights = driver.Values(padding.chunk, 1);
  weights[padding.chunk_offset] = 1;
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(weights.data()),
                                         weights.size() * sizeof(float));
  EXPECT_TRUE(Refused(driver.job().WriteInitialWeights(padding.chunk, {bytes}),
                      absl::StatusCode::kInvalidArgument));
  driver.UploadWeights();
  driver.AttachAll();
  driver.BeginAll();
  for (int c = 0; c < static_cast<int>(driver.layout().chunks().size()); ++c) {
    std::vector<float> values = driver.Values(c, 1);
    if (c == padding.chunk) values[padding.chunk_offset] = 1;
    ASSERT_TRUE(driver.Send(c, values, 0).ok());
  }
  driver.EndMicroStepAll(0);
  for (int rank = 0; rank < 2; ++rank)
    ASSERT_EQ(driver.stream(rank).Seal(1, 1).value(), std::nullopt);
  const auto refusal = driver.stream(2).Seal(1, 1).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
}

TEST_F(ShardingTest, AMissingShardIsNamed) {
  JobDriver driver = Make(Spec(Shardings()[5], 256));
  driver.BeginAll();
  // Rank 1 has the right halves of "embedding" and "wide", and of "cube" all rows from 25 on.
  const absl::Span<const int> chunks = driver.layout().chunks_of_rank(1);
  for (int c = 0; c < static_cast<int>(driver.layout().chunks().size()); ++c) {
    if (c == chunks.back()) continue;
    ASSERT_TRUE(driver.Send(c, driver.Values(c, 1), 0).ok());
  }
  driver.EndMicroStepAll(0);
  EXPECT_EQ(driver.stream(0).Seal(1, 1).value(), std::nullopt);
  const auto refusal = driver.stream(1).Seal(1, 1).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kSendAndSealAgain));
}

// Whose shards cut no group of 64 elements, in any of the shardings.
JobSpec PackedSpec(const Sharding& sharding, StateFormat format, int64_t chunk_elements,
                   UpdateMode mode) {
  JobSpec spec;
  spec.name = absl::StrCat(sharding.name, "-", Name(format), "-", chunk_elements);
  spec.groups = {{.name = "packed"}, {.name = "fp32"}, {.name = "small"}};
  spec.groups[0].hyper_parameters.beta2 = 0.97;
  spec.update_mode = mode;
  LayoutSpec& layout = spec.layout;
  layout.world_size = sharding.world_size;
  layout.group_count = 3;
  layout.chunk_elements = chunk_elements;
  layout.mesh = sharding.mesh;
  layout.states = {{.format = format}, {}, {.format = format}};
  layout.parameters = {{.name = "wide", .shape = {12, 512}},
                       {.name = "bias", .shape = {77}},
                       {.name = "square", .shape = {64, 128}},
                       {.name = "other", .shape = {12, 512}, .group = 1},
                       {.name = "small", .shape = {50, 7}, .group = 2}};
  spec.groups[2].hyper_parameters.beta2 = 0.97;
  if (sharding.mesh.empty()) {
    EXPECT_TRUE(CutInBuckets(4096, layout).ok());
    return spec;
  }
  for (ParameterSpec& parameter : layout.parameters) {
    for (const Placement& placement : sharding.placements) {
      const bool fits = placement.shard_dim < static_cast<int>(parameter.shape.size());
      parameter.placements.push_back(fits ? placement : kReplicate);
    }
  }
  return spec;
}

TEST_F(ShardingTest, PackedStateHasTheSameBitsUnderEach) {
  for (const StateFormat format : {StateFormat::kBFloat16, StateFormat::k8Bit}) {
    std::string saved_state;
    std::string later_state;
    for (const Sharding& sharding : Shardings()) {
      for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
        const int64_t chunk_elements = mode == UpdateMode::kWait ? 512 : 1024;
        JobDriver driver = Make(PackedSpec(sharding, format, chunk_elements, mode));
        Train(driver, 0, 2);
        ASSERT_TRUE(driver.job().Save((root_ / driver.job().spec().name).string()).ok());
        const std::string saved = driver.job().StateHash();
        Train(driver, 2, 1);
        const std::string later = driver.job().StateHash();
        if (saved_state.empty()) {
          saved_state = saved;
          later_state = later;
        }
        EXPECT_EQ(saved, saved_state) << driver.job().spec().name;
        EXPECT_EQ(later, later_state) << driver.job().spec().name;
        driver.DetachAll();
      }
    }
    for (const Sharding& sharding : Shardings()) {
      JobSpec spec = PackedSpec(sharding, format, 256, UpdateMode::kWait);
      const std::string from = PackedSpec(Shardings()[4], format, 512, UpdateMode::kWait).name;
      JobDriver driver(engine_, spec);
      driver.SetMaxNorm(1.0);
      ASSERT_TRUE(driver.job().Load((root_ / from).string()).ok());
      EXPECT_EQ(driver.job().StateHash(), saved_state) << spec.name;
      driver.AttachAll();
      Train(driver, 2, 1);
      EXPECT_EQ(driver.job().StateHash(), later_state) << spec.name;
    }
  }
}

}  // namespace
}  // namespace ballast
