// An optimizer that lets a test act at any instant of a step, or answer in the real one's place.
#ifndef BALLAST_TESTS_GPU_WORKER_TRAINING_MEDDLING_OPTIMIZER_H_
#define BALLAST_TESTS_GPU_WORKER_TRAINING_MEDDLING_OPTIMIZER_H_

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu_worker/run/worker_run.h"
#include "gpu_worker/training/optimizer.h"

namespace ballast::worker {

enum class Verb {
  kJoin,
  kBegin,
  kPush,
  kEndMicroStep,
  kSeal,
  kReadDirections,
  kGiveOrthogonal,
  kReceive
};
enum class When { kBefore, kAfter };

struct Instant {
  Verb verb = Verb::kBegin;
  When when = When::kBefore;
  int rank = 0;
  uint64_t step = 1;  // The one after the committed step, also while that is being received.
  int index = 0;      // Zero-based index of the push or micro-step end within the step.

  bool operator==(const Instant&) const = default;
};

// Called on the ranks' threads; an error is what the verb returns. Before: the real one is not
// asked.
using Meddle = std::function<absl::Status(const Instant&)>;

class MeddlingOptimizer final : public StepOptimizer {
 public:
  MeddlingOptimizer(std::unique_ptr<StepOptimizer> real, int rank, Meddle meddle)
      : real_(std::move(real)), rank_(rank), meddle_(std::move(meddle)) {}

  // From now on each Join has other memory for gradients, and Push is to come with the latest.
  void GiveFreshMemory() { gives_fresh_memory_ = true; }

  absl::Status Join(const FillChunk& first_weights) override {
    stale_.push_back(std::exchange(fresh_, {}));
    return Around(Verb::kJoin, 0, [&] { return real_->Join(first_weights); });
  }
  Generation generation() const override { return real_->generation(); }
  uint64_t committed_step() const override { return real_->committed_step(); }
  std::string trainer_state() const override { return real_->trainer_state(); }
  bool last_step_applied() const override { return real_->last_step_applied(); }
  absl::Span<std::byte> gradient_memory(int chunk) override {
    const absl::Span<std::byte> memory = real_->gradient_memory(chunk);
    if (!gives_fresh_memory_) return memory;
    fresh_[chunk].resize(memory.size());
    return absl::MakeSpan(fresh_[chunk]);
  }
  absl::Span<std::byte> weights_memory(int chunk) override { return real_->weights_memory(chunk); }
  std::string transport() const override { return real_->transport(); }

  absl::Status BeginStep(const StepSettings& settings) override {
    step_ = committed_step() + 1;
    pushes_ = ends_ = 0;
    return Around(Verb::kBegin, 0, [&] { return real_->BeginStep(settings); });
  }
  absl::Status Push(client::GradientPush push) override {
    if (gives_fresh_memory_) EXPECT_EQ(push.payload.data(), fresh_[push.chunk].data());
    const std::function<void()> released = push.released;
    bool asked = false;
    const absl::Status status = Around(Verb::kPush, pushes_++, [&] {
      asked = true;
      return real_->Push(std::move(push));
    });
    if (!asked) released();
    return status;
  }
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) override {
    return Around(Verb::kEndMicroStep, ends_++,
                  [&] { return real_->EndMicroStep(micro_step, used); });
  }
  absl::StatusOr<client::StepDecision> Seal(uint32_t micro_steps, const StepVote& vote) override {
    absl::StatusOr<client::StepDecision> decision;
    const absl::Status status = Around(Verb::kSeal, 0, [&] {
      decision = real_->Seal(micro_steps, vote);
      return decision.status();
    });
    if (!status.ok()) return status;
    return decision;
  }
  uint64_t directions_step() const override { return real_->directions_step(); }
  absl::StatusOr<std::vector<HyperParameters>> ReadDirections(
      const std::function<void(int chunk, absl::Span<const std::byte> direction)>& place) override {
    absl::StatusOr<std::vector<HyperParameters>> values;
    const absl::Status status = Around(Verb::kReadDirections, 0, [&] {
      values = real_->ReadDirections(place);
      return values.status();
    });
    if (!status.ok()) return status;
    return values;
  }
  absl::Status GiveOrthogonal(
      const std::function<void(int chunk, absl::Span<std::byte> out)>& fill) override {
    return Around(Verb::kGiveOrthogonal, 0, [&] { return real_->GiveOrthogonal(fill); });
  }
  absl::Status ReceiveWeights() override {
    return Around(Verb::kReceive, 0, [&] { return real_->ReceiveWeights(); });
  }
  double update_seconds() const override { return real_->update_seconds(); }
  absl::StatusOr<client::JobCounts> ReadCounts() override { return real_->ReadCounts(); }
  absl::Status SaveCheckpoint(const std::string& directory) override {
    return real_->SaveCheckpoint(directory);
  }

 private:
  absl::Status Around(Verb verb, int index, const std::function<absl::Status()>& real) {
    Instant instant{
        .verb = verb, .when = When::kBefore, .rank = rank_, .step = step_, .index = index};
    if (absl::Status status = meddle_(instant); !status.ok()) return status;
    absl::Status status = real();
    instant.when = When::kAfter;
    if (absl::Status meddled = meddle_(instant); !meddled.ok()) return meddled;
    return status;
  }

  const std::unique_ptr<StepOptimizer> real_;
  const int rank_;
  const Meddle meddle_;
  uint64_t step_ = 1;
  bool gives_fresh_memory_ = false;
  std::map<int, std::vector<std::byte>> fresh_;  // By chunk.
  std::vector<std::map<int, std::vector<std::byte>>> stale_;
  int pushes_ = 0;
  int ends_ = 0;
};

inline MakeOptimizer Meddling(MakeOptimizer make, Meddle meddle, bool fresh_memory = false) {
  return [make = std::move(make), meddle = std::move(meddle), fresh_memory](
             const TrainingJob& job, TrainingBackend& backend,
             Collective& collective) -> absl::StatusOr<std::unique_ptr<StepOptimizer>> {
    absl::StatusOr<std::unique_ptr<StepOptimizer>> real = make(job, backend, collective);
    if (!real.ok()) return real.status();
    auto meddling =
        std::make_unique<MeddlingOptimizer>(*std::move(real), collective.rank(), meddle);
    if (fresh_memory) meddling->GiveFreshMemory();
    return meddling;
  };
}

// Does `act` the first time that `at` comes.
inline Meddle OnceAt(const Instant& at, std::function<absl::Status()> act) {
  auto done = std::make_shared<std::atomic<bool>>(false);
  return [=, act = std::move(act)](const Instant& instant) {
    if (instant != at || done->exchange(true)) return absl::OkStatus();
    return act();
  };
}

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_TRAINING_MEDDLING_OPTIMIZER_H_
