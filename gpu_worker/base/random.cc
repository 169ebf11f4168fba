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
  return Mix(Mix(Mix(seed) ^ stream) ^ index);
}

float RandomNormal(uint64_t seed, uint64_t stream, uint64_t index) {
  int64_t sum = 0;  // The sum of twelve 16-bit numbers; its mean is 12 * 65535 / 2.
  for (uint64_t draw = 0; draw < 3; ++draw) {
    const uint64_t bits = RandomBits(seed, stream, 3 * index + draw);
    for (int shift = 0; shift < 64; shift += 16) sum += (bits >> shift) & 0xffff;
  }
  return static_cast<float>(sum - 6 * 65535) / 65536.0f;
}

}  // namespace ballast::worker
