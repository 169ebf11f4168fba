#include "gpu_worker/gpt/device_layers.h"

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/layer_norm.h"

namespace ballast::worker {
namespace {

// Calls an event for a weight and its bias, which are read, or whose gradients are written,
// together.
absl::Status CallForBoth(const std::function<absl::Status(int)>& event, int weight) {
  BALLAST_RETURN_IF_ERROR(Call(event, weight));
  return Call(event, weight + 1);
}

}  // namespace

absl::Status LayerPass::Run(const Matmul& product, int parameter) const {
  return Annotate(matmul.Run(compute, product), parameters[parameter].name);
}

absl::Status LinearForward(const LayerPass& pass, const Linear& linear, const BFloat16Bits* in,
                           BFloat16Bits* out, BFloat16Bits* before_gelu) {
  BALLAST_RETURN_IF_ERROR(CallForBoth(pass.events.before_weights, linear.weight));
  // With gelu the sum before it is kept (`aux`): there backward takes the derivative of gelu.
  return pass.Run(
      {.m = pass.rows,
       .n = linear.out,
       .k = linear.in,
       .transpose_b = true,
       .a = in,
       .b = pass.weight(linear.weight),
       .out = out,
       .epilogue = before_gelu == nullptr ? MatmulEpilogue::kBias : MatmulEpilogue::kBiasGelu,
       .bias = pass.weight(linear.weight + 1),
       .aux = before_gelu},
      linear.weight);
}

// The weight goes on its way before the bias is begun: it is what takes long to send.
absl::Status LinearGradients(const LayerPass& pass, const Linear& linear, const BFloat16Bits* d_out,
                             const BFloat16Bits* in) {
  const int bias = linear.weight + 1;
  BALLAST_RETURN_IF_ERROR(Call(pass.events.before_gradient, linear.weight));
  BALLAST_RETURN_IF_ERROR(pass.Run({.m = linear.out,
                                    .n = linear.in,
                                    .k = pass.rows,
                                    .transpose_a = true,
                                    .a = d_out,
                                    .b = in,
                                    .out = pass.gradient(linear.weight),
                                    .out_is_fp32 = true,
                                    .beta = pass.add_gradients ? 1.0f : 0.0f},
                                   linear.weight));
  BALLAST_RETURN_IF_ERROR(Call(pass.events.gradient_ready, linear.weight));
  // This does not come before the product above, because the stream would wait for the bias's
  // bucket as well. That is another one, since biases are in another group.
  BALLAST_RETURN_IF_ERROR(Call(pass.events.before_gradient, bias));
  BALLAST_RETURN_IF_ERROR(cuda::ColumnSum(pass.compute, pass.rows, static_cast<int>(linear.out),
                                          d_out, pass.gradient(bias), pass.add_gradients,
                                          pass.scratch));
  return Call(pass.events.gradient_ready, bias);
}

absl::Status LinearInputGradient(const LayerPass& pass, const Linear& linear,
                                 const BFloat16Bits* d_out, BFloat16Bits* d_in,
                                 BFloat16Bits* before_gelu) {
  return pass.Run(
      {.m = pass.rows,
       .n = linear.in,
       .k = linear.out,
       .a = d_out,
       .b = pass.weight(linear.weight),
       .out = d_in,
       .epilogue = before_gelu == nullptr ? MatmulEpilogue::kNone : MatmulEpilogue::kGeluBackward,
       .aux = before_gelu},
      linear.weight);
}

absl::Status NormForward(const LayerPass& pass, int weight, int width, const BeforeNorm& before,
                         const NormActivations& norm) {
  // The sum is made by the norm, which reads all of it anyway, and not by a kernel of its own.
  // Backward needs it, so it is kept in norm.in.
  const bool adds = before.branch != nullptr;
  BALLAST_RETURN_IF_ERROR(CallForBoth(pass.events.before_weights, weight));
  return cuda::LayerNormForward(pass.compute, {.rows = pass.rows, .width = width},
                                {.x = adds ? before.stream : norm.in,
                                 .residual = before.branch,
                                 .weight = pass.weight(weight),
                                 .bias = pass.weight(weight + 1),
                                 .sum = adds ? norm.in : nullptr,
                                 .out = norm.out,
                                 .mean = norm.mean,
                                 .rstd = norm.rstd});
}

absl::Status NormBackward(const LayerPass& pass, int weight, int width, const BFloat16Bits* d_out,
                          const NormActivations& norm, BFloat16Bits* d_stream, bool assign) {
  BALLAST_RETURN_IF_ERROR(CallForBoth(pass.events.before_gradient, weight));
  // One kernel call writes all three gradients, so here weight and bias are ready together.
  BALLAST_RETURN_IF_ERROR(cuda::LayerNormBackward(pass.compute, {.rows = pass.rows, .width = width},
                                                  {.d_out = d_out,
                                                   .x = norm.in,
                                                   .weight = pass.weight(weight),
                                                   .mean = norm.mean,
                                                   .rstd = norm.rstd,
                                                   .d_stream = d_stream,
                                                   .assign = assign,
                                                   .weight_gradient = pass.gradient(weight),
                                                   .bias_gradient = pass.gradient(weight + 1),
                                                   .add = pass.add_gradients,
                                                   .scratch = pass.scratch}));
  return CallForBoth(pass.events.gradient_ready, weight);
}

}  // namespace ballast::worker
