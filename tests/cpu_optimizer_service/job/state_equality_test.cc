// P7: given the same reduced gradients, the state is the same to the bit, whatever the number of
// threads, the chunk size and the world size.
#include <gtest/gtest.h>

#include <string>

#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/sanitizers.h"

namespace ballast {
namespace {

struct Way {
  int threads = 1;
  int world_size = 1;
  int64_t chunk_elements = kMaxChunkElements;
  int64_t bucket_elements = 1 << 20;
  UpdateMode update_mode = UpdateMode::kWait;
  Sending sending = Sending::kPayload;
};

// Three groups that differ in everything, several micro-steps, clipping that bites, a schedule.
std::string HashAfterTraining(const Way& way) {
  // Sanitizers look at the code, which fewer elements run through as well.
  constexpr int64_t kPart = kSanitized ? 16 : 1;
  JobSpec spec =
      MakeJobSpec({.group_sizes = {{300000 / kPart, 0, 77, 1}, {}, {5000, 123456 / kPart}, {256}},
                   .world_size = way.world_size,
                   .bucket_elements = way.bucket_elements,
                   .chunk_elements = way.chunk_elements});
  spec.groups[0].wire_dtype = DType::kFloat16;
  spec.groups[2].wire_dtype = DType::kFloat32;
  spec.groups[2].hyper_parameters = {
      .lr = 0.01, .beta1 = 0.8, .decoupled_weight_decay = false, .amsgrad = true};
  spec.groups[3].return_dtype = DType::kFloat32;
  spec.update_mode = way.update_mode;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = way.threads});
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  driver.SetMaxNorm(1.0);
  driver.SetSending(way.sending);
  driver.AttachAll();
  const GradientScale scale = {.loss_scale = 2, .divisors = {3, 1, 6, 1}};
  for (uint64_t step = 0; step < 3; ++step) {
    const StepSettings settings = {.scale = scale, .overrides = {{0, {.lr = 0.1 / (step + 1)}}}};
    const StepOutcome outcome = driver.Step(100 * step, 1 + step, settings);
    EXPECT_LT(outcome.decision.clip_coefficient, 1.0);
  }
  return driver.job().StateHash();
}

const std::string& Expected() {
  static const std::string& hash = *new std::string(HashAfterTraining({}));
  return hash;
}

TEST(State, IsTheSameForAnyNumberOfThreads) {
  for (const int threads : {2, 3, 8}) {
    EXPECT_EQ(HashAfterTraining({.threads = threads}), Expected()) << threads << " threads";
  }
}

TEST(State, IsTheSameForAnyChunkSize) {
  for (const int64_t elements : {int64_t{256}, int64_t{512}, int64_t{4096}, int64_t{100 * 256}}) {
    EXPECT_EQ(HashAfterTraining({.threads = 2, .chunk_elements = elements}), Expected())
        << elements << " elements";
  }
}

TEST(State, IsTheSameForAnyWorldSizeAndBucketSize) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const int64_t bucket_elements : {int64_t{1024}, int64_t{100000}, int64_t{1} << 20}) {
      EXPECT_EQ(HashAfterTraining(
                    {.threads = 2, .world_size = world_size, .bucket_elements = bucket_elements}),
                Expected())
          << world_size << " ranks, buckets of " << bucket_elements;
    }
  }
}

TEST(State, IsTheSameWhenChunksAreUpdatedAheadOfTheDecision) {
  for (const int threads : {1, 2, 8}) {
    for (const int64_t chunk_elements : {int64_t{256}, kMaxChunkElements}) {
      EXPECT_EQ(HashAfterTraining({.threads = threads,
                                   .world_size = 2,
                                   .chunk_elements = chunk_elements,
                                   .bucket_elements = 100000,
                                   .update_mode = UpdateMode::kSpeculate}),
                Expected())
          << threads << " threads, chunks of " << chunk_elements;
    }
  }
}

TEST(State, IsTheSameWhereGradientsAndWeightsStayInPlace) {
  for (const Sending sending : {Sending::kInPlace, Sending::kMixed}) {
    for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
      for (const int threads : {1, 2, 8}) {
        for (const int64_t chunk_elements : {int64_t{512}, kMaxChunkElements}) {
          EXPECT_EQ(HashAfterTraining({.threads = threads,
                                       .world_size = 2,
                                       .chunk_elements = chunk_elements,
                                       .bucket_elements = 100000,
                                       .update_mode = mode,
                                       .sending = sending}),
                    Expected())
              << threads << " threads, chunks of " << chunk_elements << ", "
              << (sending == Sending::kMixed ? "mixed" : "in place") << ", "
              << (mode == UpdateMode::kWait ? "waiting" : "speculating");
        }
      }
    }
  }
}

TEST(State, DiffersWhenOneGradientDiffers) {  // The hash can fail.
  JobSpec spec = MakeJobSpec({});
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  JobDriver a(engine, spec);
  spec.name = "b";
  JobDriver b(engine, spec);
  for (JobDriver* driver : {&a, &b}) {
    driver->UploadWeights();
    driver->AttachAll();
    driver->BeginAll();
    std::vector<float> values = driver->Values(0, 1);
    if (driver == &b) values[100] += 0.125f;
    ASSERT_TRUE(driver->Send(0, values, 0).ok());
    for (int c = 1; c < static_cast<int>(driver->layout().chunks().size()); ++c) {
      ASSERT_TRUE(driver->Send(c, driver->Values(c, 1), 0).ok());
    }
    driver->EndMicroStepAll(0);
    driver->SealAll(1);
  }
  EXPECT_NE(a.job().StateHash(), b.job().StateHash());
}

}  // namespace
}  // namespace ballast
