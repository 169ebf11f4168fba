// Conversions between the number formats, and loads and stores of several elements at once.
//
// Rounding is that of common/float_format.h: GPUs have it in hardware, NaN payloads excepted; on
// the CPU it is that very code.
#ifndef BALLAST_GPU_WORKER_CUDA_NUMERIC_CUH_
#define BALLAST_GPU_WORKER_CUDA_NUMERIC_CUH_

#include <cstddef>
#include <cstdint>

#include "cpu_optimizer_service/common/dtype.h"
#include "gpu_worker/cuda/launch.cuh"
#include "gpu_worker/device/matmul.h"
#ifdef BALLAST_CUDA_ON_CPU
#include "cpu_optimizer_service/common/float_format.h"
#endif

namespace ballast::worker::cuda {

__device__ __forceinline__ float FromBFloat16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ uint16_t ToBFloat16(float value) {
#ifdef BALLAST_CUDA_ON_CPU
  return FloatToBFloat16(value);
#else
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#endif
}

// Both rounded, `low` in the low half.
__device__ __forceinline__ uint32_t ToBFloat16Pair(float low, float high) {
#ifdef BALLAST_CUDA_ON_CPU
  return static_cast<uint32_t>(ToBFloat16(high)) << 16 | ToBFloat16(low);
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

__device__ __forceinline__ float FromFloat16(uint16_t bits) {
#ifdef BALLAST_CUDA_ON_CPU
  return Float16ToFloat(bits);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

__device__ __forceinline__ uint16_t ToFloat16(float value) {
#ifdef BALLAST_CUDA_ON_CPU
  return FloatToFloat16(value);
#else
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#endif
}

// kCount elements that one instruction loads or stores: they lie at a multiple of their size.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T x[kCount];
};

// fp32 values of kCount elements, which lie at a multiple of their size, 16 bytes at most.
template <int kCount>
struct Floats {
  float x[kCount];
};

template <int kCount>
__device__ __forceinline__ Floats<kCount> LoadFloats(const float* from) {
  constexpr int kPack = kCount < 4 ? kCount : 4;
  Floats<kCount> values;
#pragma unroll
  for (int i = 0; i < kCount; i += kPack) {
    const auto pack = *reinterpret_cast<const Pack<float, kPack>*>(from + i);
#pragma unroll
    for (int j = 0; j < kPack; ++j) values.x[i + j] = pack.x[j];
  }
  return values;
}

template <int kCount>
__device__ __forceinline__ void StoreFloats(float* to, const Floats<kCount>& values) {
  constexpr int kPack = kCount < 4 ? kCount : 4;
#pragma unroll
  for (int i = 0; i < kCount; i += kPack) {
    Pack<float, kPack> pack;
#pragma unroll
    for (int j = 0; j < kPack; ++j) pack.x[j] = values.x[i + j];
    *reinterpret_cast<Pack<float, kPack>*>(to + i) = pack;
  }
}

template <int kCount>
__device__ __forceinline__ Floats<kCount> LoadBFloat16(const BFloat16Bits* from) {
  Floats<kCount> values;
  if constexpr (kCount == 1) {
    values.x[0] = FromBFloat16(*from);
  } else {
    const auto pairs = *reinterpret_cast<const Pack<uint32_t, kCount / 2>*>(from);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      values.x[i] = __uint_as_float(pairs.x[i / 2] << 16);
      values.x[i + 1] = __uint_as_float(pairs.x[i / 2] & 0xffff0000u);
    }
  }
  return values;
}

template <int kCount>
__device__ __forceinline__ void StoreBFloat16(BFloat16Bits* to, const Floats<kCount>& values) {
  if constexpr (kCount == 1) {
    *to = ToBFloat16(values.x[0]);
  } else {
    Pack<uint32_t, kCount / 2> pairs;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      pairs.x[i / 2] = ToBFloat16Pair(values.x[i], values.x[i + 1]);
    }
    *reinterpret_cast<Pack<uint32_t, kCount / 2>*>(to) = pairs;
  }
}

// Elements [begin, begin + kCount) of an array of `dtype`.
template <int kCount>
__device__ __forceinline__ Floats<kCount> LoadWire(const void* data, DType dtype, int64_t begin) {
  if (dtype == DType::kFloat32) {
    return LoadFloats<kCount>(static_cast<const float*>(data) + begin);
  }
  const auto* bits = static_cast<const uint16_t*>(data) + begin;
  if (dtype == DType::kBFloat16) return LoadBFloat16<kCount>(bits);
  const auto pack = *reinterpret_cast<const Pack<uint16_t, kCount>*>(bits);
  Floats<kCount> values;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values.x[i] = FromFloat16(pack.x[i]);
  return values;
}

template <int kCount>
__device__ __forceinline__ void StoreWire(void* data, DType dtype, int64_t begin,
                                          const Floats<kCount>& values) {
  if (dtype == DType::kFloat32) {
    StoreFloats<kCount>(static_cast<float*>(data) + begin, values);
    return;
  }
  auto* bits = static_cast<uint16_t*>(data) + begin;
  if (dtype == DType::kBFloat16) {
    StoreBFloat16<kCount>(bits, values);
    return;
  }
  Pack<uint16_t, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.x[i] = ToFloat16(values.x[i]);
  *reinterpret_cast<Pack<uint16_t, kCount>*>(bits) = pack;
}

// Over the warp, in a fixed order; every lane gets the sum.
__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int with = 16; with > 0; with /= 2) value += __shfl_xor_sync(0xffffffffu, value, with);
  return value;
}

// On the host: whether packs of `count` elements of `element_bytes` may begin at `data`, which may
// be null.
inline bool HoldsPacks(const void* data, int count, size_t element_bytes) {
  const size_t pack_bytes = count * element_bytes;
  return reinterpret_cast<uintptr_t>(data) % (pack_bytes < 16 ? pack_bytes : 16) == 0;
}

// On the host: a grid with a thread for each of `count`.
inline Grid GridFor(int64_t count, unsigned threads) {
  return {.blocks = dim3(static_cast<unsigned>((count + threads - 1) / threads)),
          .threads = threads};
}

// This thread's number in such a grid.
__device__ __forceinline__ int64_t ThreadOfGrid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// For all kThreads threads of a block, of which each gives `mine`: their sum, on every thread. Pairs
// of threads are added. `of_threads` is shared.
template <unsigned kThreads>
__device__ __forceinline__ double SumOfBlock(double mine, double (&of_threads)[kThreads]) {
  const unsigned thread = threadIdx.x;
  of_threads[thread] = mine;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) of_threads[thread] += of_threads[thread + half];
  }
  __syncthreads();
  return of_threads[0];
}

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_NUMERIC_CUH_
