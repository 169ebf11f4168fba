#undef NDEBUG  // The assertion is what a test wants to see fail.
#include <cassert>

#include "gpu_worker/cuda/launch.cuh"
#include "tests/gpu/launch_test_kernels.h"

namespace ballast::worker::cuda {
namespace {

__global__ void StoreSevenKernel(uint32_t* to) {
  assert(to != nullptr);
  if (threadIdx.x == 0) *to = 7;
}

}  // namespace

absl::Status StoreSeven(DeviceStream& stream, uint32_t* to, unsigned threads, size_t shared_bytes) {
  return Launch(stream, "store seven", Grid{.threads = threads, .shared_bytes = shared_bytes},
                &StoreSevenKernel, to);
}

}  // namespace ballast::worker::cuda
