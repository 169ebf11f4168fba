// A few parameters instead of a model, for tests of the pipeline around the passes: gradients are
// functions of their place and their micro-step, weights of theirs, and each pass notes which
// weights it read.
#ifndef BALLAST_TESTS_GPU_WORKER_PIPELINE_SCRIPTED_PASSES_H_
#define BALLAST_TESTS_GPU_WORKER_PIPELINE_SCRIPTED_PASSES_H_

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/gpt/device_gpt.h"
#include "gpu_worker/training/training_job.h"
#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker {

// What a pass is of, as the test's batches carry it.
struct PassPosition {
  uint64_t step = 0;
  uint32_t micro_step = 0;
};

inline Batch BatchOf(const PassPosition& at) {
  return {.sequences = 1,
          .context = 1,
          .inputs = {static_cast<int32_t>(at.step), static_cast<int32_t>(at.micro_step)},
          .targets = {}};
}

inline uint64_t Mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Small integers: their sums are exact, in whatever order ranks are added.
inline float GradientOf(int rank, const PassPosition& at, int group, int64_t offset) {
  const uint64_t place = static_cast<uint64_t>(offset) * 2 + group;
  return static_cast<float>(Mix(((at.step * 16 + at.micro_step) * 16 + rank) * 1000003 + place) %
                            4001) -
         2000.0f;
}

// The weights after a step, as bf16. Never NaN, which is what poisoned memory has.
inline uint16_t WeightOf(uint64_t step, int group, int64_t offset) {
  return static_cast<uint16_t>(Mix(step * 7919 + offset * 2 + group) % 0x7f00);
}

// Sizes that begin and end anywhere in blocks, buckets and chunks, in two groups.
inline std::vector<ModelParameter> ScriptedParameters() {
  return {{.name = "a", .shape = {700}, .decay = true},
          {.name = "b", .shape = {3}, .decay = false},
          {.name = "c", .shape = {20, 31}, .decay = true},
          {.name = "d", .shape = {513}, .decay = false},
          {.name = "e", .shape = {1}, .decay = true},
          {.name = "f", .shape = {1030}, .decay = true}};
}

inline std::vector<int> ScriptedBackwardOrder() { return {5, 3, 4, 2, 1, 0}; }

// Buckets of two or three chunks, some of whose shards are cut short or empty.
inline TrainingJob ScriptedJob(int world_size, DType wire_dtype, uint32_t micro_steps,
                               UpdateMode update_mode = UpdateMode::kWait) {
  return MakeTrainingJob(ScriptedParameters(), {.world_size = world_size,
                                                .micro_steps = micro_steps,
                                                .wire_dtype = wire_dtype,
                                                .update_mode = update_mode,
                                                .bucket_elements = 768,
                                                .chunk_elements = 256})
      .value();
}

struct PassScript {
  int rank = 0;
  // By position and parameter; null: every parameter has a gradient.
  std::function<bool(const PassPosition& at, int parameter)> reaches;
  // Instead of GradientOf, where it has a value; on the device's thread.
  std::function<std::optional<float>(const PassPosition& at, int group, int64_t offset)> other;
  // Called when a forward pass has given what reads the parameter's weights; null: nothing.
  std::function<absl::Status(const PassPosition& at, int parameter)> after_forward;
  // Called between the gradients of a pass; null: nothing.
  std::function<absl::Status(const PassPosition& at, int parameter)> before_gradient;
};

// What a pass read, by parameter; written by the device's thread, read once the pass is done.
using WeightsRead = std::vector<std::vector<uint16_t>>;

class ScriptedPasses final : public DeviceGpt {
 public:
  ScriptedPasses(const DeviceGptParts& parts, PassScript script, std::vector<WeightsRead>& passes)
      : compute_(parts.compute), script_(std::move(script)), passes_(passes) {}

  void Place(const Layout& layout, const DeviceFlatSpaces& spaces) override {
    layout_ = &layout;
    spaces_ = spaces;
  }

  absl::Status Forward(const Batch& batch, const DevicePassEvents& events) override {
    at_ = {.step = static_cast<uint64_t>(batch.inputs[0]),
           .micro_step = static_cast<uint32_t>(batch.inputs[1])};
    const int parameters = static_cast<int>(layout_->spec().parameters.size());
    read_ = std::make_shared<WeightsRead>(parameters);
    for (int p = 0; p < parameters; ++p) {
      BALLAST_RETURN_IF_ERROR(events.before_weights(p));
      BALLAST_RETURN_IF_ERROR(GiveToFakeStream(compute_, "forward", [this, p, read = read_] {
        const uint16_t* from = spaces_.weights[group(p)] + layout_->place(p).offset;
        (*read)[p].assign(from, from + layout_->place(p).elements);
      }));
      if (script_.after_forward) BALLAST_RETURN_IF_ERROR(script_.after_forward(at_, p));
    }
    return absl::OkStatus();
  }

  absl::Status Prepare(const Batch&) override { return absl::OkStatus(); }
  absl::Status Backward(const BackwardOptions& options, double* loss_sum,
                        const DevicePassEvents& events) override {
    const PassPosition at = at_;
    for (const int p : ScriptedBackwardOrder()) {
      if (script_.reaches && !script_.reaches(at, p)) continue;
      if (script_.before_gradient) BALLAST_RETURN_IF_ERROR(script_.before_gradient(at, p));
      BALLAST_RETURN_IF_ERROR(events.before_gradient(p));
      BALLAST_RETURN_IF_ERROR(GiveToFakeStream(
          compute_, "backward", [this, p, at, options] { WriteGradient(p, at, options); }));
      BALLAST_RETURN_IF_ERROR(events.gradient_ready(p));
    }
    return GiveToFakeStream(compute_, "loss", [this, read = read_, at, options, loss_sum] {
      *loss_sum = (options.add_loss ? *loss_sum : 0) + LossOf(at);
      passes_.push_back(*read);
    });
  }

  static double LossOf(const PassPosition& at) { return at.step + at.micro_step / 16.0; }

  int64_t activation_bytes() const override { return 0; }
  double FloatingPointOperations(int sequences) const override { return 0; }

 private:
  int group(int parameter) const { return layout_->spec().parameters[parameter].group; }
  void WriteGradient(int p, const PassPosition& at, const BackwardOptions& options) {
    const auto scale = static_cast<float>(options.loss_scale);
    const ParameterPlace& place = layout_->place(p);
    for (int64_t i = place.offset; i < place.offset + place.elements; ++i) {
      const std::optional<float> other =
          script_.other ? script_.other(at, group(p), i) : std::nullopt;
      const float value =
          other.has_value() ? *other : scale * GradientOf(script_.rank, at, group(p), i);
      float& gradient = spaces_.gradients[group(p)][i];
      gradient = options.add_gradients ? gradient + value : value;
    }
  }

  DeviceStream& compute_;
  const PassScript script_;
  std::vector<WeightsRead>& passes_;
  const Layout* layout_ = nullptr;
  DeviceFlatSpaces spaces_;
  PassPosition at_;  // The last Forward's.
  std::shared_ptr<WeightsRead> read_;
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_PIPELINE_SCRIPTED_PASSES_H_
