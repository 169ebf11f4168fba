// The part of a model without arithmetic: its memory, and a backward from the last parameter to the
// first. A test defines what backward writes.
#ifndef BALLAST_TESTS_GPU_WORKER_TRAINING_MODEL_IN_MEMORY_H_
#define BALLAST_TESTS_GPU_WORKER_TRAINING_MODEL_IN_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu_worker/training/model.h"

namespace ballast::worker {

class ModelInMemory : public Model {
 public:
  explicit ModelInMemory(int parameters) {
    for (int p = parameters - 1; p >= 0; --p) backward_order_.push_back(p);
  }

  const std::vector<int>& backward_order() const override { return backward_order_; }
  void Place(const Layout& layout, absl::Span<const int64_t> group_elements,
             DType weights_dtype) override {
    layout_ = &layout;
    dtype_ = weights_dtype;
    for (const int64_t elements : group_elements) {
      weights_.emplace_back(elements * SizeBytes(dtype_));
      gradients_.emplace_back(elements, 0.0f);
    }
  }
  DType weights_dtype() const override { return dtype_; }
  absl::Span<std::byte> weights(int group) override { return absl::MakeSpan(weights_[group]); }
  absl::Span<float> gradients(int group) override { return absl::MakeSpan(gradients_[group]); }

 protected:
  // Where a parameter's gradient goes.
  absl::Span<float> GradientOf(int parameter) {
    const ParameterPlace& place = layout_->place(parameter);
    return gradients(layout_->spec().parameters[parameter].group)
        .subspan(place.offset, place.elements);
  }

 private:
  std::vector<int> backward_order_;
  const Layout* layout_ = nullptr;
  DType dtype_ = DType::kBFloat16;
  std::vector<std::vector<std::byte>> weights_;
  std::vector<std::vector<float>> gradients_;
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_TRAINING_MODEL_IN_MEMORY_H_
