#include "gpu_worker/base/random.h"

namespace ballast::worker {
namespace {

// A bijection of 64 bits whose every output bit depends on every input bit: the finaliser of
// splitmix64 (Steele, Lea and Flood 2014), after its increment.
uint64_t Mix(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

}  // namespace

uint64_t RandomBits(uint64_t seed, uint64_t stream, uint64_t index) {
  // Each value is mixed before the next comes in: the plain xor of the three would be the same for
  // (1, 2, 0) and (2, 1, 0).
  return Mix(Mix(Mix(seed) ^ stream) ^ index);
}

float RandomNormal(uint64_t seed, uint64_t stream, uint64_t index) {
  int64_t sum = 0;  // The sum of twelve 16-bit numbers; its mean is 12 * 65535 / 2.
  for (uint64_t draw = 0; draw < 3; ++draw) {
    const uint64_t bits = RandomBits(seed, stream, 3 * index + draw);
    for (int shift = 0; shift < 64; shift += 16) sum += (bits >> shift) & 0xffff;
  }
  // The variance of the sum is 12 * (65536^2 - 1) / 12, so dividing by 65536 makes it about 1. Both
  // conversions are exact: the sum has fewer than 24 bits, and the divisor is a power of two.
  return static_cast<float>(sum - 6 * 65535) / 65536.0f;
}

}  // namespace ballast::worker
