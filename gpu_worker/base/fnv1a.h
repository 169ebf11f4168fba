// The hash FNV-1a, 64 bits: equal in every process, to compare two processes' data. Not for
// adversarial input.
#ifndef BALLAST_GPU_WORKER_BASE_FNV1A_H_
#define BALLAST_GPU_WORKER_BASE_FNV1A_H_

#include <cstdint>

namespace ballast::worker {

class Fnv1a {
 public:
  // Adds bytes, as the hash is defined, or tokens instead of bytes.
  void Add(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3; }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BASE_FNV1A_H_
