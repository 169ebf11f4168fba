// Layer normalisation of each row (Ba, Kiros and Hinton 2016).
#ifndef BALLAST_GPU_WORKER_CPU_LAYER_NORM_H_
#define BALLAST_GPU_WORKER_CPU_LAYER_NORM_H_

namespace ballast::worker::cpu {

struct LayerNormShape {
  int rows;
  int width;
};

//   mean[r]   = mean of in[r]
//   rstd[r]   = 1 / sqrt(variance of in[r] + 1e-5)
//   out[r][i] = (in[r][i] - mean[r]) * rstd[r] * weight[i] + bias[i]
//
// `mean` and `rstd` have a value per row and are kept for the backward pass.
template <typename T>
void LayerNormForward(const LayerNormShape& shape, const T* in, const T* weight, const T* bias,
                      T* out, T* mean, T* rstd);

// With n = (in - mean) * rstd and g = d_out * weight, row by row:
//   d_in += rstd * (g - mean(g) - n * mean(g * n))         added: the residual stream branches here
//   d_weight = sum over rows of d_out * n
//   d_bias   = sum over rows of d_out
template <typename T>
void LayerNormBackward(const LayerNormShape& shape, const T* d_out, const T* in, const T* weight,
                       const T* mean, const T* rstd, T* d_in, T* d_weight, T* d_bias);

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_LAYER_NORM_H_
