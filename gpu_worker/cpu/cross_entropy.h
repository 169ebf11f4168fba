// Softmax and cross-entropy together.
#ifndef BALLAST_GPU_WORKER_CPU_CROSS_ENTROPY_H_
#define BALLAST_GPU_WORKER_CPU_CROSS_ENTROPY_H_

#include <cstdint>

namespace ballast::worker::cpu {

struct CrossEntropyShape {
  int rows;
  int classes;
};

// Returns sum over rows of -log softmax(logits[r])[targets[r]], in nats. Replaces the logits by the
// gradient of that sum, softmax(logits[r]) - one_hot(targets[r]). `row_losses` is scratch of one
// value per row.
template <typename T>
double CrossEntropy(const CrossEntropyShape& shape, const int32_t* targets, T* logits,
                    double* row_losses);

}  // namespace ballast::worker::cpu

#endif  // BALLAST_GPU_WORKER_CPU_CROSS_ENTROPY_H_
