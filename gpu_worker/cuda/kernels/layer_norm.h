// Layer norm over rows, and the residual stream around it. Statistics are fp32.
//
//   mean = sum(x) / width,   rstd = 1 / sqrt(sum((x - mean)^2) / width + 1e-5)
//   out  = (x - mean) * rstd * weight + bias                              Ba, Kiros, Hinton 2016
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_LAYER_NORM_H_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_LAYER_NORM_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

struct LayerNormShape {
  int64_t rows = 0;
  int width = 0;
};

// sum = x + residual, rounded to bf16; out = the layer norm of that rounded sum. `residual` null:
// of x itself, and `sum` is not written. `mean`, `rstd`: one fp32 a row.
struct LayerNormForwardArgs {
  const BFloat16Bits* x = nullptr;
  const BFloat16Bits* residual = nullptr;
  const BFloat16Bits* weight = nullptr;
  const BFloat16Bits* bias = nullptr;
  BFloat16Bits* sum = nullptr;
  BFloat16Bits* out = nullptr;
  float* mean = nullptr;
  float* rstd = nullptr;
};
absl::Status LayerNormForward(DeviceStream& stream, const LayerNormShape& shape,
                              const LayerNormForwardArgs& args);

// d_stream[row] += gradient of x, in fp32, rounded once; or = if `assign`. weight_gradient and
// bias_gradient are written, or added to if `add`. Columns are summed in a fixed order through
// `scratch`.
struct LayerNormBackwardArgs {
  const BFloat16Bits* d_out = nullptr;
  const BFloat16Bits* x = nullptr;  // What was normalised: LayerNormForwardArgs::sum, or x.
  const BFloat16Bits* weight = nullptr;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  BFloat16Bits* d_stream = nullptr;
  bool assign = false;
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;
  bool add = false;
  float* scratch = nullptr;  // LayerNormScratchBytes of it.
};
size_t LayerNormScratchBytes(const LayerNormShape& shape);
absl::Status LayerNormBackward(DeviceStream& stream, const LayerNormShape& shape,
                               const LayerNormBackwardArgs& args);

// gradient[column] = sum over rows of d_out[row][column], in fp32 and a fixed order: the gradient
// of a linear layer's bias; or += if `add`. `scratch` has ColumnSumScratchBytes, which more rows
// never make less.
size_t ColumnSumScratchBytes(int64_t rows, int columns);
absl::Status ColumnSum(DeviceStream& stream, int64_t rows, int columns, const BFloat16Bits* d_out,
                       float* gradient, bool add, float* scratch);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_LAYER_NORM_H_
