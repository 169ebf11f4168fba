// GPT-2's passes on a device: bf16 weights and activations, fp32 accumulation, statistics and
// gradients. It gives work to one stream and does not wait for it, except that a pass begins once
// the tokens of the one before the last are on the device; the callbacks order other work before or
// after its pieces.
//
//   auto model = DeviceGpt::Create(config, {device, compute, matmul}, sequences).value();
//   model->Place(layout, {.weights = ..., .gradients = ...});
//   model->Forward(batch, {.before_weights = ...});          // through the last norm
//   model->Backward({}, loss_sum, {.gradient_ready = ...});  // the loss, and back
//
// Threads: one caller at a time.
#ifndef BALLAST_GPU_WORKER_GPT_DEVICE_GPT_H_
#define BALLAST_GPU_WORKER_GPT_DEVICE_GPT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/base/data.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"
#include "gpu_worker/gpt/architecture.h"

namespace ballast::worker {

struct DeviceGptParts {
  Device& device;
  DeviceStream& compute;
  DeviceMatmul& matmul;
};

// By group, flat spaces on the device, at least as long as the layout requires.
struct DeviceFlatSpaces {
  std::vector<BFloat16Bits*> weights;
  std::vector<float*> gradients;
};

// Each is nullable. An error ends the pass.
struct DevicePassEvents {
  // Forward is about to give the stream work that reads the parameter, for the first time in this
  // pass. If the weights are still on their way, the callback makes the stream wait. In the order
  // of the layers.
  std::function<absl::Status(int parameter)> before_weights;
  // Backward is about to give the stream work that writes the parameter's gradient, for the first
  // time in this pass.
  std::function<absl::Status(int parameter)> before_gradient;
  // The work that completes the parameter's gradient has been given to the stream: record an event
  // there now. Each trainable parameter once, in GptBackwardOrder.
  std::function<absl::Status(int parameter)> gradient_ready;
};

struct BackwardOptions {
  double loss_scale = 1;  // Gradients are of the loss times this.
  // Whether loss and gradients are added to the present values, as in later micro-steps of a sum;
  // false: written.
  bool add_loss = false;
  bool add_gradients = false;
};

class DeviceGpt {
 public:
  // Memory for passes of up to `sequences` sequences of the full context. RESOURCE_EXHAUSTED,
  // naming what to make smaller; INVALID_ARGUMENT if the kernels do not support the shape.
  static absl::StatusOr<std::unique_ptr<DeviceGpt>> Create(const GptConfig& config,
                                                           const DeviceGptParts& parts,
                                                           int sequences);
  // Waits for the passes given. The parts outlive it.
  virtual ~DeviceGpt() = default;

  // The places of weights and gradients. Called once, before any pass.
  virtual void Place(const Layout& layout, const DeviceFlatSpaces& spaces) = 0;

  // The host's part of the next Forward, if that is of the same batch; for when the device is busy.
  // `batch` is not used after the call. Errors as in Forward.
  virtual absl::Status Prepare(const Batch& batch) = 0;
  // Gives the compute stream the batch's pass up to the logits. Another Forward replaces one
  // without a Backward. An empty batch reads no weights. `batch` is not used after the call.
  // INVALID_ARGUMENT, without work, for a batch with more sequences than in Create, or with a token
  // outside the vocabulary. Other errors are the device's and the callbacks'.
  virtual absl::Status Forward(const Batch& batch, const DevicePassEvents& events) = 0;
  // The rest, once for each Forward: logits, loss, gradients. Gradients are of the loss summed over
  // the batch's tokens; zeros for an empty batch. `*loss_sum` is a double on the device.
  virtual absl::Status Backward(const BackwardOptions& options, double* loss_sum,
                                const DevicePassEvents& events) = 0;
  // Both.
  absl::Status ForwardBackward(const Batch& batch, const BackwardOptions& options, double* loss_sum,
                               const DevicePassEvents& events);

  // Activations and scratch, on the device.
  virtual int64_t activation_bytes() const = 0;
  // Multiplications and additions of one pass over `sequences` full sequences, forward and
  // backward, as the products that the definition needs (recomputation not counted).
  virtual double FloatingPointOperations(int sequences) const = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_GPT_DEVICE_GPT_H_
