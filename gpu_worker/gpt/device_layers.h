// The layers with parameters that GPT-2 has many of, on the device: linear layers and layer norms,
// forward and backward. A layer's parameters are its weight and, next after it, its bias.
//
// Events are called as device_gpt.h specifies. Errors: those of the matmul, the kernels and the
// events.
#ifndef BALLAST_GPU_WORKER_GPT_DEVICE_LAYERS_H_
#define BALLAST_GPU_WORKER_GPT_DEVICE_LAYERS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"
#include "gpu_worker/gpt/activations.h"
#include "gpu_worker/gpt/device_gpt.h"

namespace ballast::worker {

struct ParameterOnDevice {
  std::string name;
  const BFloat16Bits* weight = nullptr;
  float* gradient = nullptr;
  int64_t elements = 0;
};

// What the layers of one pass share.
struct LayerPass {
  DeviceStream& compute;
  DeviceMatmul& matmul;
  absl::Span<const ParameterOnDevice> parameters;
  const DevicePassEvents& events;
  int64_t rows = 0;
  float* scratch = nullptr;
  bool add_gradients = false;  // BackwardOptions.

  const BFloat16Bits* weight(int parameter) const { return parameters[parameter].weight; }
  float* gradient(int parameter) const { return parameters[parameter].gradient; }
  // A product with a parameter, which an error names.
  absl::Status Run(const Matmul& product, int parameter) const;
};

// A null event is OK.
inline absl::Status Call(const std::function<absl::Status(int)>& event, int parameter) {
  return event == nullptr ? absl::OkStatus() : event(parameter);
}

struct Linear {
  int weight = 0;   // The parameter.
  int64_t in = 0;   // Features.
  int64_t out = 0;  // Features.
};

// out[rows][out] = in[rows][in] weight[out][in]^T + bias; through gelu if `before_gelu` is given,
// which keeps the sum.
absl::Status LinearForward(const LayerPass& pass, const Linear& linear, const BFloat16Bits* in,
                           BFloat16Bits* out, BFloat16Bits* before_gelu = nullptr);
// d_weight[out][in] = d_out[rows][out]^T in[rows][in],  d_bias = sum over rows of d_out; or += both
absl::Status LinearGradients(const LayerPass& pass, const Linear& linear, const BFloat16Bits* d_out,
                             const BFloat16Bits* in);
// d_in[rows][in] = d_out[rows][out] weight[out][in]; back through gelu if the layer's input is
// gelu(`before_gelu`).
absl::Status LinearInputGradient(const LayerPass& pass, const Linear& linear,
                                 const BFloat16Bits* d_out, BFloat16Bits* d_in,
                                 BFloat16Bits* before_gelu = nullptr);

// The residual stream before the norm, and what is added to it first.
struct BeforeNorm {
  const BFloat16Bits* stream = nullptr;
  const BFloat16Bits* branch = nullptr;
};
// norm.in = stream + branch, unless there is no branch: the stream is in norm.in then.
absl::Status NormForward(const LayerPass& pass, int weight, int width, const BeforeNorm& before,
                         const NormActivations& norm);
// d_stream = or += the gradient of norm.in.
absl::Status NormBackward(const LayerPass& pass, int weight, int width, const BFloat16Bits* d_out,
                          const NormActivations& norm, BFloat16Bits* d_stream, bool assign);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_GPT_DEVICE_LAYERS_H_
