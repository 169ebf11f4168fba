// Causal multi-head self-attention (Vaswani et al. 2017) between its two linear layers.
#ifndef BALLAST_GPU_WORKER_CPU_ATTENTION_H_
#define BALLAST_GPU_WORKER_CPU_ATTENTION_H_

namespace ballast::worker::cpu {

struct AttentionShape {
  int sequences;
  int context;
  int width;
  int heads;  // Divides width.
};

// `qkv` is [sequences * context][3 * width]: a row holds query, key and value; within each, head h
// has elements [h * width / heads, (h + 1) * width / heads).
//
//   probabilities[s][h][t] = softmax over t' <= t of q_t . k_t' / sqrt(width / heads)
//   out[s][t] = sum over t' of probabilities[t'] * v_t'
//
// `probabilities`, sequences * heads * context * context, is kept for the backward pass.
template <typename T>
void AttentionForward(const AttentionShape& shape, const T* qkv, T* probabilities, T* out);

// `scratch` is as large as `probabilities`.
template <typename T>
void AttentionBackward(const AttentionShape& shape, const T* d_out, const T* qkv,
                       const T* probabilities, T* d_qkv, T* scratch);

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_ATTENTION_H_
