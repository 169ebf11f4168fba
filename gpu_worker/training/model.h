// A model on the CPU, as its backend (cpu/cpu_backend.h) uses it: weights in their return format
// and fp32 gradients in flat spaces, and one call for a forward and backward pass.
//
//   std::unique_ptr<Model> model = MakeCpuGpt(config);
//   Layout layout = ...;                      // from GptParameters(config)
//   model->Place(layout, group_elements, DType::kBFloat16);
//   double loss_sum = model->ForwardBackward(batch, 1, [&](int parameter) { ... });
//
// Threads: one caller at a time. `gradient_ready` is called from the calling thread.
#ifndef BALLAST_GPU_WORKER_TRAINING_MODEL_H_
#define BALLAST_GPU_WORKER_TRAINING_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/base/data.h"

namespace ballast::worker {

class Model {
 public:
  virtual ~Model() = default;

  // Every trainable parameter by index, in the order in which a backward pass completes gradients.
  // The same on all ranks, so that all ranks reduce their buckets in the same order.
  virtual const std::vector<int>& backward_order() const = 0;

  // Gives each group `group_elements[group]` elements of memory for weights and as many for
  // gradients, all zeros; at least the group's flat space, more where buckets reach past its end.
  // Parameters are where `layout` places them. Called once, before any of the calls below.
  virtual void Place(const Layout& layout, absl::Span<const int64_t> group_elements,
                     DType weights_dtype) = 0;

  virtual DType weights_dtype() const = 0;
  // One flat space of elements of that format, with which the passes compute. The optimizer writes
  // it between passes.
  virtual absl::Span<std::byte> weights(int group) = 0;
  // Gradients of the last pass, one flat space. After gradient_ready for a parameter, the model
  // does not touch that parameter's elements until the next pass.
  virtual absl::Span<float> gradients(int group) = 0;

  // One forward and backward pass over the batch. Returns the cross-entropy in nats, summed (not
  // averaged) over the batch's tokens; gradients are of that sum times `loss_scale`, multiplied in
  // before backward, so that only the service divides. Writes, not adds, the gradients.
  // Deterministic to the bit, whatever the number of threads.
  virtual double ForwardBackward(const Batch& batch, double loss_scale,
                                 const std::function<void(int parameter)>& gradient_ready) = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_MODEL_H_
