// A linear layer: out = in * weight^T + bias.
//
// T is float in training and double in the tests of the formulas, here and in the other layers.
#ifndef BALLAST_GPU_WORKER_CPU_MATMUL_H_
#define BALLAST_GPU_WORKER_CPU_MATMUL_H_

namespace ballast::worker::cpu {

struct MatmulShape {
  int rows;  // Tokens.
  int in;
  int out;
};

// out[r][o] = sum_i in[r][i] * weight[o][i] + bias[o]; `bias` is nullable.
template <typename T>
void MatmulForward(const MatmulShape& shape, const T* in, const T* weight, const T* bias, T* out);

// d_in[r][i]     = sum_o d_out[r][o] * weight[o][i]
// d_weight[o][i] = sum_r d_out[r][o] * in[r][i]
// d_bias[o]      = sum_r d_out[r][o]                   null: there is no bias
template <typename T>
void MatmulBackward(const MatmulShape& shape, const T* d_out, const T* in, const T* weight, T* d_in,
                    T* d_weight, T* d_bias);

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_MATMUL_H_
