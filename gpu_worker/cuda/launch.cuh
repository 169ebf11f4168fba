// What a kernel file (cuda/kernels/*.cu) may use of CUDA, so that the same file also compiles for
// the tests' device, which runs kernels on the CPU (tests/gpu_emulator/cuda_on_cpu/):
//   __global__, __device__, __forceinline__, __restrict__, __launch_bounds__, __shared__ arrays;
//   threadIdx, blockIdx, blockDim, gridDim; __syncthreads, __syncwarp, __shfl_sync,
//   __shfl_xor_sync, __shfl_down_sync with the full mask; atomics of integers only;
//   the _rn intrinsics, expf, exp2f, logf, tanhf, sqrtf, rsqrtf, __expf, fabsf, fmaxf, fminf,
//   __float_as_uint and back; and of our own: DynamicShared, Launch, and what mma.cuh has.
// Kernels have no other way to memory than their arguments.
#ifndef BALLAST_GPU_WORKER_CUDA_LAUNCH_CUH_
#define BALLAST_GPU_WORKER_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/gpu_stream.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker::cuda {

struct Grid {
  dim3 blocks = {1, 1, 1};
  unsigned threads = 1;     // In a block.
  size_t shared_bytes = 0;  // Dynamic.
};

// The block's dynamic shared memory, 16-byte aligned.
template <typename T>
__device__ __forceinline__ T* DynamicShared() {
  extern __shared__ __align__(16) unsigned char ballast_dynamic_shared[];
  return reinterpret_cast<T*>(ballast_dynamic_shared);
}

// Gives `kernel` to the stream. An empty grid is no work. `name` is for errors, which are those of
// GpuFailure::Check: of this launch, or of work that the GPU was given before and failed in.
template <typename... Parameters, typename... Arguments>
absl::Status Launch(DeviceStream& stream, absl::string_view name, const Grid& grid,
                    void (*kernel)(Parameters...), Arguments... arguments) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return absl::OkStatus();
  auto& gpu = static_cast<GpuStream&>(stream);
  BALLAST_ASSIGN_OR_RETURN(const cudaStream_t native, gpu.Enter());
  cudaError_t error = cudaSuccess;
  if (grid.shared_bytes > 48 * 1024) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(grid.shared_bytes));
  }
  if (error == cudaSuccess) {
    (void)cudaGetLastError();  // From a destructor, for example, which returns no error.
    kernel<<<grid.blocks, grid.threads, grid.shared_bytes, native>>>(Parameters(arguments)...);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) return absl::OkStatus();
  return gpu.Check(error, absl::StrCat("kernel ", name, " (", grid.blocks.x, " x ", grid.blocks.y,
                                       " x ", grid.blocks.z, " blocks of ", grid.threads,
                                       " threads, ", grid.shared_bytes, " bytes shared)"));
}

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_LAUNCH_CUH_
