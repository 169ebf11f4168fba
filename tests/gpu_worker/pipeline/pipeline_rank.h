// One rank of a test's world: a device of its own, the pipeline around scripted passes, and an
// optimizer that notes what it is handed.
#ifndef BALLAST_TESTS_GPU_WORKER_PIPELINE_PIPELINE_RANK_H_
#define BALLAST_TESTS_GPU_WORKER_PIPELINE_PIPELINE_RANK_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/device/gloo_device_collective.h"
#include "gpu_worker/device/single_device_collective.h"
#include "gpu_worker/pipeline/device_backend.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/gpu_worker/pipeline/scripted_passes.h"

namespace ballast::worker {

struct Pushed {
  uint64_t step = 0;
  int chunk = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
  bool final = false;
  std::vector<std::byte> payload;
};

struct Ended {
  uint64_t step = 0;
  uint32_t micro_step = 0;
  size_t pushes = 0;  // Earlier ones, of all steps.
  UsedParameters used;
};

struct RankOptions {
  DType wire_dtype = DType::kBFloat16;
  uint32_t micro_steps = 1;  // In each step.
  UpdateMode update_mode = UpdateMode::kWait;
  DeviceBackendOptions backend = {};
  FakeDeviceOptions device = {};
  PassScript script = {};
  Timeline* timeline = nullptr;
  // Before the collective's own Finish. Nullable.
  std::function<absl::Status()> finish;
  // Instead of noting and releasing; it calls Note itself. On the sender's thread.
  std::function<absl::Status(client::GradientPush push)> push;
};

// Memory for all chunks of a rank, one after another as in a mapping.
struct OptimizersMemory {
  OptimizersMemory(const TrainingJob& job, int rank, DType dtype) {
    size_t bytes = 0;
    for (const int chunk : job.layout.chunks_of_rank(rank)) {
      begins.push_back(bytes);
      bytes += job.layout.chunks()[chunk].elements * SizeBytes(dtype);
      chunks.push_back(chunk);
    }
    begins.push_back(bytes);
    memory.resize(bytes);
  }
  absl::Span<std::byte> at(int chunk) {
    const size_t i = std::find(chunks.begin(), chunks.end(), chunk) - chunks.begin();
    return absl::MakeSpan(memory).subspan(begins[i], begins[i + 1] - begins[i]);
  }
  std::vector<int> chunks;
  std::vector<size_t> begins;
  std::vector<std::byte> memory;
};

// One whose Finish may fail, as after an abort: the device says that all is done.
class FinishingCollective final : public DeviceCollective {
 public:
  FinishingCollective(std::unique_ptr<DeviceCollective> wrapped,
                      std::function<absl::Status()> finish)
      : wrapped_(std::move(wrapped)), finish_(std::move(finish)) {}
  int rank() const override { return wrapped_->rank(); }
  int world_size() const override { return wrapped_->world_size(); }
  absl::Status ReduceScatterSum(DeviceStream& stream, const float* input, float* shard,
                                int64_t shard_elements, const Purpose& purpose) override {
    return wrapped_->ReduceScatterSum(stream, input, shard, shard_elements, purpose);
  }
  absl::Status AllGather(DeviceStream& stream, const std::byte* shard, std::byte* all,
                         size_t shard_bytes, const Purpose& purpose) override {
    return wrapped_->AllGather(stream, shard, all, shard_bytes, purpose);
  }
  absl::Status Finish() override {
    const absl::Status finished = finish_ ? finish_() : absl::OkStatus();
    return finished.ok() ? wrapped_->Finish() : finished;
  }

 private:
  const std::unique_ptr<DeviceCollective> wrapped_;
  const std::function<absl::Status()> finish_;
};

class PipelineRank final : public GradientSink {
 public:
  // `host` is nullable: then a world of one.
  explicit PipelineRank(RankOptions options, Collective* host = nullptr)
      : options_(std::move(options)),
        world_size_(host == nullptr ? 1 : host->world_size()),
        rank_(host == nullptr ? 0 : host->rank()),
        job_(ScriptedJob(world_size_, options_.wire_dtype, options_.micro_steps,
                         options_.update_mode)),
        weights_(job_, rank_, DType::kBFloat16),
        device_(options_.device),
        matmul_(MakeFakeMatmul()),
        collective_(host == nullptr ? MakeSingleDeviceCollective(device_)
                                    : MakeGlooDeviceCollective(device_, *host),
                    options_.finish) {
    options_.script.rank = rank_;
  }

  // Where the device can fail; the other calls need it.
  absl::Status Create() {
    BALLAST_ASSIGN_OR_RETURN(
        backend_,
        MakeDeviceBackendOf(
            options_.backend, {device_, *matmul_, collective_, job_, options_.timeline},
            ScriptedBackwardOrder(),
            [this](const DeviceGptParts& parts) -> absl::StatusOr<std::unique_ptr<DeviceGpt>> {
              return std::make_unique<ScriptedPasses>(parts, options_.script, passes_);
            }));
    backend_->Start(*this);
    return UseWeightsMemory();
  }
  absl::Status Push(client::GradientPush push) override {
    if (options_.push) return options_.push(std::move(push));
    Note(push);
    push.released();
    return absl::OkStatus();
  }
  absl::Status PushAll(std::vector<client::GradientPush> pushes) override {
    {
      MutexLock lock(mutex_);
      ++hand_overs_;
    }
    return GradientSink::PushAll(std::move(pushes));
  }
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) override {
    MutexLock lock(mutex_);
    ended_.push_back({step_, micro_step, pushed_.size(), used});
    return absl::OkStatus();
  }
  void ForgetWeightsMemory() { weights_.memory = {}; }
  // As after a session that was lost.
  absl::Status UseWeightsMemory() {
    return backend_->UseWeightsMemory([this](int chunk) { return weights_.at(chunk); });
  }

  void Note(const client::GradientPush& push) {
    MutexLock lock(mutex_);
    pushed_.push_back({.step = step_,
                       .chunk = push.chunk,
                       .begin = push.micro_step_begin,
                       .end = push.micro_step_end,
                       .final = push.final,
                       .payload = {push.payload.begin(), push.payload.end()}});
  }

  absl::Status MicroStep(uint64_t step, uint32_t micro_step, double loss_scale = 1) {
    if (micro_step == 0) {
      MutexLock lock(mutex_);
      step_ = step;
    }
    const Batch batch = BatchOf({step, micro_step});
    return backend_->MicroStep({.step = step,
                                .micro_step = micro_step,
                                .micro_steps = options_.micro_steps,
                                .batch = batch,
                                .loss_scale = loss_scale});
  }
  // All micro-steps, and the end.
  absl::StatusOr<FinishedStep> Passes(uint64_t step) {
    absl::Status status;
    for (uint32_t m = 0; m < options_.micro_steps && status.ok(); ++m) status = MicroStep(step, m);
    absl::StatusOr<FinishedStep> finished = backend_->FinishStep();
    BALLAST_RETURN_IF_ERROR(status);
    return finished;
  }

  // Puts the weights of a step into this rank's chunks, in an order of the seed's, and announces
  // some; then gathers.
  absl::Status GiveWeights(uint64_t step, uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const int chunk : Shuffled(seed)) {
      WriteWeights(step, chunk);
      if (random() % 3 != 0) backend_->OnWeights(chunk);
    }
    return backend_->GatherWeights();
  }
  // The same as they come: from another thread, while the forward pass of micro-step 0 of the next
  // step is given. `come` brings them all, whatever else it does.
  absl::Status GiveWeightsUnderForward(uint64_t step, const std::function<void()>& come) {
    BALLAST_RETURN_IF_ERROR(backend_->ExpectWeights());
    std::thread optimizer(come);
    const absl::Status forward = StartForward(step + 1);
    optimizer.join();
    BALLAST_RETURN_IF_ERROR(forward);
    return backend_->GatherWeights();
  }
  absl::Status StartForward(uint64_t step) {
    const Batch batch = BatchOf({step, 0});
    return backend_->StartForward({.step = step,
                                   .micro_step = 0,
                                   .micro_steps = options_.micro_steps,
                                   .batch = batch,
                                   .loss_scale = 0});
  }
  // A chunk's weights of `step` are there, and announced.
  void TellWeights(uint64_t step, int chunk) {
    WriteWeights(step, chunk);
    backend_->OnWeights(chunk);
  }
  // This rank's chunks, in an order of the seed's.
  std::vector<int> Shuffled(uint64_t seed) const {
    std::vector<int> chunks(job_.layout.chunks_of_rank(rank_).begin(),
                            job_.layout.chunks_of_rank(rank_).end());
    std::mt19937_64 random(seed);
    std::shuffle(chunks.begin(), chunks.end(), random);
    return chunks;
  }
  void WriteWeights(uint64_t step, int index) {
    const Chunk& chunk = job_.layout.chunks()[index];
    const absl::Span<std::byte> to = weights_.at(index);
    ASSERT_EQ(to.size(), chunk.elements * sizeof(uint16_t));
    for (int64_t i = 0; i < chunk.elements; ++i) {
      reinterpret_cast<uint16_t*>(to.data())[i] = WeightOf(step, chunk.group, chunk.begin + i);
    }
  }

  // --- What must have arrived.

  // A chunk's gradient summed over all ranks and micro-steps [begin, end), in the wire dtype.
  std::vector<std::byte> Expected(uint64_t step, int index, uint32_t begin, uint32_t end) const {
    const Chunk& chunk = job_.layout.chunks()[index];
    std::vector<std::byte> bytes(chunk.elements * SizeBytes(options_.wire_dtype));
    for (int64_t i = 0; i < chunk.elements; ++i) {
      const int64_t offset = chunk.begin + i;
      const int parameter = job_.layout.ParameterAt(chunk.group, offset);
      float sum = 0;
      for (uint32_t m = begin; parameter >= 0 && m < end; ++m) {
        if (options_.script.reaches && !options_.script.reaches({step, m}, parameter)) continue;
        for (int rank = 0; rank < world_size_; ++rank) {
          sum += GradientOf(rank, {step, m}, chunk.group, offset);
        }
      }
      StoreElement(bytes.data(), options_.wire_dtype, i, sum);
    }
    return bytes;
  }
  // Every push so far has the bytes that it must have.
  void ExpectRightBytes() const {
    for (const Pushed& push : pushed()) {
      EXPECT_TRUE(push.payload == Expected(push.step, push.chunk, push.begin, push.end))
          << "step " << push.step << " chunk " << push.chunk << " micro-step " << push.begin;
    }
  }
  // The steps from the first to `steps` were handed over whole, each chunk once and in order.
  void ExpectWhole(uint64_t steps) const {
    ExpectRightBytes();
    const bool sums_here = options_.backend.accumulation == Accumulation::kWorker;
    const uint32_t reductions = sums_here ? 1 : options_.micro_steps;
    const size_t chunks = job_.layout.chunks_of_rank(rank_).size();
    const std::vector<Pushed> pushed = this->pushed();
    const std::vector<Ended> ended = this->ended();
    ASSERT_EQ(pushed.size(), steps * reductions * chunks);
    ASSERT_EQ(ended.size(), steps * options_.micro_steps);
    for (size_t i = 0; i < ended.size(); ++i) {
      const uint32_t m = i % options_.micro_steps;
      EXPECT_EQ(ended[i].step, 1 + i / options_.micro_steps);
      EXPECT_EQ(ended[i].micro_step, m);
      const size_t before = ended[i].step - 1;
      EXPECT_EQ(ended[i].pushes,
                sums_here ? (before + (m + 1 == options_.micro_steps)) * chunks : (i + 1) * chunks);
    }
    for (size_t r = 0; r < steps * reductions; ++r) {
      std::vector<int> seen;
      for (size_t i = r * chunks; i < (r + 1) * chunks; ++i) {
        seen.push_back(pushed[i].chunk);
        EXPECT_EQ(pushed[i].step, 1 + r / reductions);
        EXPECT_EQ(pushed[i].begin, r % reductions);
        EXPECT_EQ(pushed[i].end, sums_here ? options_.micro_steps : r % reductions + 1);
        EXPECT_EQ(pushed[i].final, r % reductions + 1 == reductions);
      }
      EXPECT_THAT(seen, testing::UnorderedElementsAreArray(job_.layout.chunks_of_rank(rank_)));
    }
  }
  // Pass `index`, counted from the first, read the weights of `step`.
  void ExpectRead(size_t index, uint64_t step) const {
    ASSERT_LT(index, passes_.size());
    for (size_t p = 0; p < passes_[index].size(); ++p) {
      const int group = job_.layout.spec().parameters[p].group;
      const std::vector<uint16_t>& read = passes_[index][p];
      ASSERT_EQ(read.size(), job_.layout.place(p).elements);
      for (size_t i = 0; i < read.size(); ++i) {
        ASSERT_EQ(read[i], WeightOf(step, group, job_.layout.place(p).offset + i))
            << "pass " << index << " parameter " << p << " element " << i;
      }
    }
  }

  TrainingBackend& backend() { return *backend_; }
  bool created() const { return backend_ != nullptr; }
  void Destroy() { backend_.reset(); }
  FakeDevice& device() { return device_; }
  const TrainingJob& job() const { return job_; }
  int rank() const { return rank_; }
  std::vector<Pushed> pushed() const {
    MutexLock lock(mutex_);
    return pushed_;
  }
  // Calls that brought them.
  size_t hand_overs() const {
    MutexLock lock(mutex_);
    return hand_overs_;
  }
  std::vector<Ended> ended() const {
    MutexLock lock(mutex_);
    return ended_;
  }

 private:
  RankOptions options_;
  const int world_size_;
  const int rank_;
  const TrainingJob job_;
  OptimizersMemory weights_;
  FakeDevice device_;
  const std::unique_ptr<DeviceMatmul> matmul_;
  FinishingCollective collective_;
  std::vector<WeightsRead> passes_;  // The device's thread's until the step is finished.

  mutable Mutex mutex_;
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Pushed> pushed_ ABSL_GUARDED_BY(mutex_);
  size_t hand_overs_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Ended> ended_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<TrainingBackend> backend_;
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_PIPELINE_PIPELINE_RANK_H_
