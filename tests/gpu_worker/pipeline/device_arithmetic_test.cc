// The optimizer's arithmetic on the device against the scalar references, on random layouts.
#include "gpu_worker/pipeline/device_arithmetic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/training/scalar_arithmetic.h"
#include "gpu_worker/training/training_job.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;

// A job of a few parameters of any size, in two groups and any world.
TrainingJob RandomJob(std::mt19937_64& random, DType wire_dtype, DType weights_dtype) {
  std::vector<ModelParameter> parameters;
  const int count = 1 + random() % 9;
  for (int p = 0; p < count; ++p) {
    parameters.push_back({.name = absl::StrCat("p", p),
                          .shape = {static_cast<int64_t>(1 + random() % 1500)},
                          .decay = random() % 2 == 0});
  }
  return MakeTrainingJob(parameters,
                         {.world_size = static_cast<int>(1 + random() % 3),
                          .wire_dtype = wire_dtype,
                          .weights_dtype = weights_dtype,
                          .bucket_elements = static_cast<int64_t>(256 * (1 + random() % 5)),
                          .chunk_elements = static_cast<int64_t>(256 * (1 + random() % 3))})
      .value();
}

// Mostly ordinary values, and some that rounding, flushing and overflow are about.
float AnyValue(std::mt19937_64& random) {
  switch (random() % 16) {
    case 0:
      return 0.0f;
    case 1:
      return -0.0f;
    case 2:
      return std::numeric_limits<float>::denorm_min() * (random() % 1000);
    case 3:
      return std::ldexp(1.0f, -126);
    case 4:
      return std::ldexp(1.0f + (random() % 256) / 256.0f, static_cast<int>(random() % 80) - 40);
    default:
      return std::uniform_real_distribution<float>(-2, 2)(random);
  }
}

// Both arithmetics side by side; the device's payloads and weights are memory of the device.
class Pair {
 public:
  // `sums`: of several pushes.
  Pair(const TrainingJob& job, bool sums, FakeDeviceOptions device)
      : job_(job),
        sums_(sums),
        device_(std::move(device)),
        stream_(device_.CreateStream("test").value()),
        scalar_weights_(job.layout.chunks().size()),
        scalar_(job.spec.groups, job.layout,
                [this](int chunk) { return absl::MakeSpan(scalar_weights_[chunk]); }) {
    // Neighbours lie one after the other, as in a backend's flat spaces.
    device_weights_.resize(job.layout.chunks().size());
    payloads_.resize(job.layout.chunks().size());
    size_t weights_bytes = 0, payload_bytes = 0;
    for (const int chunk : chunks()) {
      out_[chunk] = 0;
      scalar_weights_[chunk].resize(elements(chunk) * SizeBytes(group(chunk).return_dtype));
      weights_bytes += scalar_weights_[chunk].size();
      payload_bytes += elements(chunk) * SizeBytes(group(chunk).wire_dtype);
    }
    if (weights_bytes == 0) return;
    weights_memory_ = device_.Allocate(weights_bytes, "weights").value();
    payload_memory_ = device_.Allocate(payload_bytes, "a payload").value();
    std::byte* weights = weights_memory_->data();
    std::byte* payload = payload_memory_->data();
    for (const int chunk : chunks()) {
      device_weights_[chunk] = {weights, scalar_weights_[chunk].size()};
      weights += scalar_weights_[chunk].size();
      const size_t bytes = elements(chunk) * SizeBytes(group(chunk).wire_dtype);
      payloads_[chunk] = {payload, bytes};
      payload += payloads_[chunk].size();
    }
  }
  absl::Status Create() {
    BALLAST_ASSIGN_OR_RETURN(arithmetic_,
                             MakeDeviceArithmetic(device_, job_.layout, job_.spec.groups, 0, sums_,
                                                  [this](int c) { return device_weights_[c]; }));
    return absl::OkStatus();
  }

  absl::Span<const int> chunks() const { return job_.layout.chunks_of_rank(0); }
  int64_t elements(int chunk) const { return job_.layout.chunks()[chunk].elements; }
  const GroupSpec& group(int chunk) const {
    return job_.spec.groups[job_.layout.chunks()[chunk].group];
  }

  absl::Status SetFirstWeights(std::mt19937_64& random) {
    for (const int chunk : chunks()) {
      std::vector<float> values(elements(chunk));
      for (float& value : values) value = AnyValue(random);
      BALLAST_RETURN_IF_ERROR(scalar_.SetFirstWeights(chunk, values));
      BALLAST_RETURN_IF_ERROR(arithmetic_->SetFirstWeights(chunk, values));
    }
    return arithmetic_->Finish();
  }
  // The payload's memory is overwritten as soon as it is released.
  absl::Status AddGradients(absl::Span<const int> of, bool first, std::mt19937_64& random) {
    for (const int chunk : of) {
      std::vector<std::byte> payload(elements(chunk) * SizeBytes(group(chunk).wire_dtype));
      for (int64_t i = 0; i < elements(chunk); ++i) {
        StoreElement(payload.data(), group(chunk).wire_dtype, i, AnyValue(random));
      }
      BALLAST_RETURN_IF_ERROR(
          scalar_.AddGradients({{.chunk = chunk, .first = first, .payload = payload}}));
      while (out_[chunk] > 0) std::this_thread::yield();
      BALLAST_RETURN_IF_ERROR(stream_->CopyToDevice(payloads_[chunk].data(), payload));
      BALLAST_RETURN_IF_ERROR(stream_->Synchronize());
    }
    // Only what is handed over is out: a device that is lost meanwhile ends the copies.
    std::vector<LocalArithmetic::Addition> additions;
    for (const int chunk : of) {
      std::atomic<int>& out = out_[chunk];
      ++out;
      additions.push_back(
          {.chunk = chunk, .first = first, .payload = payloads_[chunk], .released = [&out] {
             --out;
           }});
    }
    return arithmetic_->AddGradients(std::move(additions));
  }
  // All of the rank's, in buckets of a few chunks, the last bucket first.
  absl::Status AddAllGradients(bool first, std::mt19937_64& random) {
    for (absl::Span<const int> left = chunks(); !left.empty();) {
      const size_t count = std::min<size_t>(left.size(), 1 + random() % 5);
      BALLAST_RETURN_IF_ERROR(AddGradients(left.last(count), first, random));
      left.remove_suffix(count);
    }
    return absl::OkStatus();
  }
  // Of blocks from anywhere in a run of neighbours to its end, the last of them short; and elements
  // at both ends of each chunk.
  void ExpectSameSums() {
    std::vector<BlocksInChunks> runs;
    int64_t blocks = 0;
    std::vector<std::vector<float>> expected_rest, got_rest;
    for (const Run& run : Runs()) {
      runs.push_back({.chunk = run.chunk, .begin = 7, .elements = run.elements - 7 - 3});
      blocks += runs.back().blocks();
    }
    std::vector<double> expected(blocks, -1.0), got(blocks, -2.0);
    ASSERT_TRUE(scalar_.BlockSums(runs, absl::MakeSpan(expected)).ok());
    ASSERT_TRUE(arithmetic_->BlockSums(runs, absl::MakeSpan(got)).ok());
    for (const int chunk : chunks()) {
      for (const auto& [begin, count] :
           {std::pair(int64_t{0}, int64_t{7}), {elements(chunk) - 3, int64_t{3}}}) {
        expected_rest.emplace_back(count, -1.0f);
        got_rest.emplace_back(count, -2.0f);
        ASSERT_TRUE(scalar_.ReadGradient(chunk, begin, absl::MakeSpan(expected_rest.back())).ok());
        ASSERT_TRUE(arithmetic_->ReadGradient(chunk, begin, absl::MakeSpan(got_rest.back())).ok());
      }
    }
    ASSERT_TRUE(arithmetic_->Finish().ok());
    EXPECT_EQ(std::memcmp(expected.data(), got.data(), got.size() * sizeof(double)), 0);
    for (size_t r = 0; r < got_rest.size(); ++r) {
      EXPECT_EQ(std::memcmp(expected_rest[r].data(), got_rest[r].data(),
                            got_rest[r].size() * sizeof(float)),
                0);
    }
  }
  // The state after an update that is not made, and that there is.
  void ExpectSameTrials(int64_t step, float multiplier) {
    for (const int chunk : chunks()) {
      for (const ChunkPiece& piece : job_.layout.Pieces(chunk)) {
        const AdamScalars scalars =
            MakeAdamScalars(group(chunk).hyper_parameters, step, multiplier);
        for (const AdamScalars* given : {&scalars, static_cast<const AdamScalars*>(nullptr)}) {
          LocalArithmetic::State expected, got;
          ASSERT_TRUE(
              scalar_.TryUpdate(chunk, piece.chunk_offset, piece.elements, given, expected).ok());
          ASSERT_TRUE(
              arithmetic_->TryUpdate(chunk, piece.chunk_offset, piece.elements, given, got).ok());
          for (const auto& [a, b] : {std::pair(&expected.master, &got.master),
                                     {&expected.exp_avg, &got.exp_avg},
                                     {&expected.exp_avg_sq, &got.exp_avg_sq}}) {
            ASSERT_EQ(a->size(), b->size());
            EXPECT_EQ(std::memcmp(a->data(), b->data(), a->size() * sizeof(float)), 0);
          }
        }
      }
    }
  }
  // Each run of neighbours in two parts.
  absl::Status Update(int64_t step, float multiplier) {
    for (const Run& run : Runs()) {
      const int64_t middle = std::min<int64_t>(elements(run.chunk), 100);
      const HyperParameters& values = group(run.chunk).hyper_parameters;
      for (const auto& [begin, count, more] :
           {std::tuple(int64_t{0}, middle, 0), {middle, run.elements - middle, 1}}) {
        if (begin >= elements(run.chunk) || count == 0) continue;
        const AdamScalars scalars = MakeAdamScalars(values, step + more, multiplier);
        BALLAST_RETURN_IF_ERROR(scalar_.Update(run.chunk, begin, count, scalars));
        BALLAST_RETURN_IF_ERROR(arithmetic_->Update(run.chunk, begin, count, scalars));
      }
    }
    BALLAST_RETURN_IF_ERROR(arithmetic_->Finish());
    arithmetic_->ForgetGradients();
    return absl::OkStatus();
  }
  void ExpectSameWeights() {
    for (const int chunk : chunks()) {
      std::vector<std::byte> weights(device_weights_[chunk].size());
      ASSERT_TRUE(stream_->CopyToHost(absl::MakeSpan(weights), device_weights_[chunk].data()).ok());
      ASSERT_TRUE(stream_->Synchronize().ok());
      EXPECT_TRUE(weights == scalar_weights_[chunk]) << "chunk " << chunk;
    }
  }
  LocalArithmetic& arithmetic() { return *arithmetic_; }
  LocalArithmetic& scalar() { return scalar_; }
  void Destroy() { arithmetic_.reset(); }
  // Payloads that are not released.
  int out() const {
    int out = 0;
    for (const auto& [chunk, count] : out_) out += count;
    return out;
  }
  int64_t allocated_bytes() const { return device_.allocated_bytes(); }

 private:
  // Chunks of this rank's that follow one another.
  struct Run {
    int chunk = 0;  // The first.
    int64_t elements = 0;
  };
  std::vector<Run> Runs() const {
    std::vector<Run> runs;
    int64_t end = -1;
    int group = -1;
    for (const int index : chunks()) {
      const Chunk& chunk = job_.layout.chunks()[index];
      if (chunk.group != group || chunk.begin != end) runs.push_back({.chunk = index});
      runs.back().elements += chunk.elements;
      group = chunk.group;
      end = chunk.begin + chunk.elements;
    }
    return runs;
  }

  const TrainingJob& job_;
  const bool sums_;
  FakeDevice device_;
  std::unique_ptr<DeviceStream> stream_;
  std::vector<std::vector<std::byte>> scalar_weights_;
  ScalarArithmetic scalar_;
  std::unique_ptr<DeviceMemory> weights_memory_, payload_memory_;
  std::vector<absl::Span<std::byte>> device_weights_, payloads_;  // By chunk.
  std::map<int, std::atomic<int>> out_;                           // By chunk.
  std::unique_ptr<LocalArithmetic> arithmetic_;
};

TEST(DeviceArithmetic, HasTheBitsOfTheScalarOneOverSeveralStepsOfAnyLayout) {
  const DType wires[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  for (uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const TrainingJob job = RandomJob(random, wires[seed % 3], wires[seed / 3 % 3]);
    const bool sums = seed % 2 == 0;
    Pair pair(job, sums, {.seed = seed});
    ASSERT_TRUE(pair.Create().ok());
    ASSERT_TRUE(pair.SetFirstWeights(random).ok());
    pair.ExpectSameWeights();
    for (int64_t step = 1; step <= 4; ++step) {
      for (int micro_step = 0; micro_step < (sums ? 1 + step % 3 : 1); ++micro_step) {
        ASSERT_TRUE(pair.AddAllGradients(/*first=*/micro_step == 0, random).ok());
      }
      if (sums && step == 3 &&
          !pair.chunks().empty()) {  // One that no micro-step had a gradient for.
        ASSERT_TRUE(pair.scalar().ZeroGradient(pair.chunks()[0]).ok());
        ASSERT_TRUE(pair.arithmetic().ZeroGradient(pair.chunks()[0]).ok());
      }
      pair.ExpectSameSums();
      pair.ExpectSameTrials(step, 0.37f);
      ASSERT_TRUE(pair.Update(step, 0.37f).ok());
      pair.ExpectSameWeights();
    }
    pair.Destroy();
    EXPECT_EQ(pair.out(), 0);
  }
}

TEST(DeviceArithmetic, HasNoSecondCopyOfTheGradientWhereNothingIsSummed) {
  std::mt19937_64 random(5);
  const TrainingJob job = RandomJob(random, DType::kBFloat16, DType::kBFloat16);
  Pair summing(job, /*sums=*/true, {.seed = 1}), pair(job, /*sums=*/false, {.seed = 1});
  ASSERT_TRUE(summing.Create().ok() && pair.Create().ok());
  int64_t elements = 0;
  for (const int chunk : pair.chunks()) elements += pair.elements(chunk);
  EXPECT_EQ(summing.allocated_bytes() - pair.allocated_bytes(),
            elements * static_cast<int64_t>(sizeof(float)));
  // Gradients are read where they were pushed, until they are forgotten.
  ASSERT_TRUE(pair.AddAllGradients(/*first=*/true, random).ok());
  ASSERT_TRUE(pair.arithmetic().Finish().ok());
  EXPECT_EQ(pair.out(), static_cast<int>(pair.chunks().size()));
  pair.arithmetic().ForgetGradients();
  EXPECT_EQ(pair.out(), 0);
  EXPECT_EQ(pair.arithmetic().ZeroGradient(pair.chunks()[0]).code(),
            absl::StatusCode::kFailedPrecondition);
}

// Nothing else is called: a thread that waits for the payload must not wait for the next one.
TEST(DeviceArithmetic, ReleasesAPayloadWithoutBeingCalledAgain) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::mt19937_64 random(seed);
    const TrainingJob job = RandomJob(random, DType::kBFloat16, DType::kBFloat16);
    if (job.layout.chunks_of_rank(0).empty()) continue;
    Pair pair(job, /*sums=*/true, {.seed = seed});
    ASSERT_TRUE(pair.Create().ok());
    ASSERT_TRUE(pair.AddGradients(pair.chunks(), true, random).ok());
    while (pair.out() > 0) std::this_thread::yield();
  }
}

TEST(DeviceArithmetic, AddsTheGradientsOfNeighboursInOneLaunch) {
  size_t chunks = 0;
  for (uint64_t seed = 0; seed < 16; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const TrainingJob job = RandomJob(random, DType::kBFloat16, DType::kBFloat16);
    int launches = 0;
    Pair pair(job, /*sums=*/true,
              {.seed = seed, .fail = [&](absl::string_view operation, absl::string_view) {
                 if (operation == "kernel") ++launches;
                 return absl::OkStatus();
               }});
    ASSERT_TRUE(pair.Create().ok());
    ASSERT_TRUE(pair.SetFirstWeights(random).ok());
    for (int micro_step = 0; micro_step < 3; ++micro_step) {
      launches = 0;
      ASSERT_TRUE(pair.AddGradients(pair.chunks(), /*first=*/micro_step == 0, random).ok());
      // Groups have one format: where one ends and the next one begins, a run goes on.
      EXPECT_EQ(launches, pair.chunks().empty() ? 0 : 1);
    }
    chunks += pair.chunks().size();
    // What is not one after the other is not one run.
    launches = 0;
    const std::vector<int> backwards(pair.chunks().rbegin(), pair.chunks().rend());
    ASSERT_TRUE(pair.AddGradients(backwards, /*first=*/false, random).ok());
    EXPECT_EQ(launches, static_cast<int>(backwards.size()));
    if (backwards.empty()) continue;
    pair.ExpectSameSums();
  }
  EXPECT_GT(chunks, 100);
}

TEST(DeviceArithmetic, ReleasesPayloadsAndSaysSoWhenTheDeviceIsLost) {
  // Operation `failing` (from 0) loses the device; an error is returned if that is before the end.
  const auto run = [](int failing, int* operations) {
    std::mt19937_64 random(3);
    const TrainingJob job = RandomJob(random, DType::kBFloat16, DType::kBFloat16);
    std::atomic<int> asked = 0;
    std::atomic<bool> armed = false;
    absl::Status status;
    {
      Pair pair(job, /*sums=*/true,
                {.seed = 2, .fail = [&](absl::string_view operation, absl::string_view what) {
                   // The test's own stream is left alone.
                   if (!armed || what == "test" || what == "a payload") return absl::OkStatus();
                   return asked++ == failing ? absl::UnavailableError("GPU 0 is lost")
                                             : absl::OkStatus();
                 }});
      armed = true;
      const auto steps = [&]() -> absl::Status {
        BALLAST_RETURN_IF_ERROR(pair.Create());
        BALLAST_RETURN_IF_ERROR(pair.SetFirstWeights(random));
        BALLAST_RETURN_IF_ERROR(pair.AddAllGradients(true, random));
        BALLAST_RETURN_IF_ERROR(pair.arithmetic().Finish());
        while (pair.out() > 0) std::this_thread::yield();
        return pair.Update(1, 1.0f);
      };
      status = steps();
      EXPECT_EQ(status.ok(), failing < 0 || asked <= failing) << "operation " << failing;
      pair.Destroy();
      EXPECT_EQ(pair.out(), 0) << "operation " << failing;
    }
    *operations = asked;
    return status;
  };
  int operations = 0;
  ASSERT_TRUE(run(-1, &operations).ok());
  ASSERT_GT(operations, 20);
  for (int failing = 0; failing < operations; ++failing) {
    int asked = 0;
    const absl::Status status = run(failing, &asked);
    if (!status.ok()) EXPECT_THAT(status.message(), HasSubstr("GPU 0 is lost"));
  }
}

TEST(DeviceArithmetic, SaysWhatMemoryItWanted) {
  std::mt19937_64 random(1);
  const TrainingJob job = RandomJob(random, DType::kBFloat16, DType::kBFloat16);
  FakeDevice device({.memory_bytes = 512});
  const absl::Status status =
      MakeDeviceArithmetic(device, job.layout, job.spec.groups, 0, /*sums=*/false, nullptr)
          .status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kResourceExhausted, reason::kDeviceMemoryFull));
}

}  // namespace
}  // namespace ballast::worker
