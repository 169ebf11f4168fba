// Token and position embeddings.
#ifndef BALLAST_GPU_WORKER_CPU_EMBEDDING_H_
#define BALLAST_GPU_WORKER_CPU_EMBEDDING_H_

#include <cstdint>

namespace ballast::worker::cpu {

struct EmbeddingShape {
  int sequences;
  int context;
  int width;
};

// out[s][t] = tokens[inputs[s][t]] + positions[t]
template <typename T>
void EmbeddingForward(const EmbeddingShape& shape, const int32_t* inputs, const T* tokens,
                      const T* positions, T* out);

// d_tokens[inputs[s][t]] += d_out[s][t]        added: the head, tied to it, has written there first
// d_positions[t] = sum over s of d_out[s][t]   written, for t < context
template <typename T>
void EmbeddingBackward(const EmbeddingShape& shape, const int32_t* inputs, const T* d_out,
                       T* d_tokens, T* d_positions);

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_EMBEDDING_H_
