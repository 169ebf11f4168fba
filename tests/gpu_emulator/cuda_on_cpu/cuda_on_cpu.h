// In place of launch.cuh when a kernel file is compiled for the CPU, as plain C++: the same names,
// and no others, so that a kernel which needs more of CUDA does not compile here. The file is
// included before all else by -include. block_run.h describes how threads run.
//
// Loads and stores of vectors must be aligned, as on a GPU: the sanitizers report it where they are
// not.
#ifndef BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_CUDA_ON_CPU_H_
#define BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_CUDA_ON_CPU_H_

// The include guard of launch.cuh.
#define BALLAST_GPU_WORKER_CUDA_LAUNCH_CUH_
#define BALLAST_CUDA_ON_CPU 1

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gpu_worker/device/device.h"
#include "tests/gpu_emulator/cuda_on_cpu/block_run.h"
#include "tests/gpu_emulator/fake_device.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// Blocks run one at a time. The section has a name, so that it can be poisoned.
#define __shared__ static __attribute__((section("ballast_shared")))

inline constexpr const uint3& threadIdx = ballast::worker::cuda::current.thread;
inline constexpr const uint3& blockIdx = ballast::worker::cuda::current.block;
inline constexpr const dim3& blockDim = ballast::worker::cuda::current.threads;
inline constexpr const dim3& gridDim = ballast::worker::cuda::current.blocks;

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// One IEEE operation each: the file is compiled with -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
inline float __expf(float a) { return ::expf(a); }
inline float __logf(float a) { return ::logf(a); }
inline float __fdividef(float a, float b) { return a / b; }

inline unsigned __float_as_uint(float a) { return std::bit_cast<unsigned>(a); }
inline int __float_as_int(float a) { return std::bit_cast<int>(a); }
inline float __uint_as_float(unsigned a) { return std::bit_cast<float>(a); }
inline float __int_as_float(int a) { return std::bit_cast<float>(a); }
inline int __clz(int a) { return std::countl_zero(static_cast<unsigned>(a)); }

inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}

// Threads do not run at the same time.
template <typename T>
T atomicAdd(T* at, T value) {
  static_assert(std::is_integral_v<T>, "sums of floats would depend on the order of threads");
  return std::exchange(*at, static_cast<T>(*at + value));
}
template <typename T>
T atomicMin(T* at, T value) {
  static_assert(std::is_integral_v<T>);
  return std::exchange(*at, value < *at ? value : *at);
}
template <typename T>
T atomicMax(T* at, T value) {
  static_assert(std::is_integral_v<T>);
  return std::exchange(*at, *at < value ? value : *at);
}

inline constexpr unsigned kBallastFullMask = 0xffffffffu;

inline void __syncthreads() { ballast::worker::cuda::MeetInBlock("__syncthreads"); }
inline void __syncwarp(unsigned mask = kBallastFullMask) {
  if (mask != kBallastFullMask) ballast::worker::cuda::FailKernel("__syncwarp of a part of a warp");
  ballast::worker::cuda::MeetInWarp("__syncwarp", nullptr, nullptr);
}

namespace ballast::worker::cuda {

template <typename T>
struct Shuffle {
  T value;
  int source;  // A lane.
  T result;

  static void Exchange(const WarpArguments& arguments) {
    for (void* const argument : arguments) {
      if (argument == nullptr) continue;
      auto& lane = *static_cast<Shuffle*>(argument);
      const void* source = arguments[lane.source];
      if (source == nullptr) {
        std::memset(&lane.result, 0xff, sizeof(T));  // The warp has no such lane.
      } else {
        lane.result = static_cast<const Shuffle*>(source)->value;
      }
    }
  }
};

// The value of lane `source`.
template <typename T>
T ShuffleFrom(const char* what, unsigned mask, T value, int source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if (mask != kBallastFullMask) FailKernel(absl::StrCat(what, " of a part of a warp"));
  Shuffle<T> shuffle{value, source, value};
  MeetInWarp(what, &Shuffle<T>::Exchange, &shuffle);
  return shuffle.result;
}

inline int Lane() { return static_cast<int>(threadIdx.x) % kWarpThreads; }

}  // namespace ballast::worker::cuda

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = ballast::worker::cuda::Lane();
  return ballast::worker::cuda::ShuffleFrom("__shfl_sync", mask, value,
                                            (lane & -width) | (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
  const int lane = ballast::worker::cuda::Lane();
  const int source = lane ^ with;
  return ballast::worker::cuda::ShuffleFrom("__shfl_xor_sync", mask, value,
                                            source < (lane & -width) + width ? source : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = ballast::worker::cuda::Lane();
  const int source = lane + static_cast<int>(by);
  return ballast::worker::cuda::ShuffleFrom("__shfl_down_sync", mask, value,
                                            source < (lane & -width) + width ? source : lane);
}

namespace ballast::worker::cuda {

struct Grid {
  dim3 blocks = {1, 1, 1};
  unsigned threads = 1;
  size_t shared_bytes = 0;
};

template <typename T>
T* DynamicShared() {
  return reinterpret_cast<T*>(current.dynamic_shared);
}

template <typename... Parameters, typename... Arguments>
absl::Status Launch(DeviceStream& stream, absl::string_view name, const Grid& grid,
                    void (*kernel)(Parameters...), Arguments... arguments) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return absl::OkStatus();
  if (grid.threads == 0 || grid.threads > kMaxBlockThreads || grid.shared_bytes > kMaxSharedBytes ||
      grid.blocks.x > kMaxGridX || grid.blocks.y > kMaxGridYZ || grid.blocks.z > kMaxGridYZ) {
    return absl::InternalError(absl::StrCat("stream ", stream.name(), ": kernel ", name,
                                            " failed: invalid configuration"));
  }
  std::function<void()> thread = [kernel, ... values = Parameters(arguments)] {
    kernel(values...);
  };
  return GiveToFakeStream(
      stream, name,
      [name = std::string(name), grid = BlockGrid{grid.blocks, grid.threads, grid.shared_bytes},
       thread = std::move(thread)] { RunBlocks(name, grid, thread); });
}

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_CUDA_ON_CPU_H_
