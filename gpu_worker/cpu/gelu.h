// GELU in its tanh form (Hendrycks and Gimpel 2016), as GPT-2 has it.
#ifndef BALLAST_GPU_WORKER_CPU_GELU_H_
#define BALLAST_GPU_WORKER_CPU_GELU_H_

namespace ballast::worker::cpu {

// u = sqrt(2 / pi) * (x + 0.044715 x^3),  out = x / 2 * (1 + tanh(u))
// `tanh_u` keeps tanh(u) for the backward pass.
template <typename T>
void GeluForward(int elements, const T* in, T* out, T* tanh_u);

// d_in = d_out * (1 / 2 * (1 + tanh(u)) + x / 2 * (1 - tanh(u)^2) * u'). In place is fine.
template <typename T>
void GeluBackward(int elements, const T* d_out, const T* in, const T* tanh_u, T* d_in);

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_GELU_H_
