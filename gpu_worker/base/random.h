// Random numbers as pure functions of their place of use: no state, no order of calls, no math
// library. So a redone step, another world size and another machine get the same ones.
#ifndef BALLAST_GPU_WORKER_BASE_RANDOM_H_
#define BALLAST_GPU_WORKER_BASE_RANDOM_H_

#include <cstdint>

namespace ballast::worker {

// 64 well-mixed bits for one `index` of one `stream` under one `seed`.
uint64_t RandomBits(uint64_t seed, uint64_t stream, uint64_t index);

// About normal, mean 0, variance 1, within [-6, 6]: the sum of twelve uniform numbers (Irwin-Hall),
// in integer arithmetic.
float RandomNormal(uint64_t seed, uint64_t stream, uint64_t index);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BASE_RANDOM_H_
