// A block has a row. It goes over the logits twice: first for their largest and the sum of
// exponentials, then, from the cache, to overwrite them.
#include "gpu_worker/cuda/kernels/cross_entropy.h"
#include "gpu_worker/cuda/numeric.cuh"

namespace ballast::worker::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kPack = 8;
// Less than any logit, and finite: it can be subtracted from itself.
constexpr float kLowest = -3.40282347e38f;

// For some of a row's logits: sum = sum of exp(logit - largest).
struct Exponentials {
  float largest;
  float sum;
};

__device__ __forceinline__ Exponentials OfNoLogits() { return {kLowest, 0}; }

// Not fused: the same bits in either order, so that all lanes of a warp get the same.
__device__ __forceinline__ Exponentials Combine(const Exponentials& a, const Exponentials& b) {
  const float largest = fmaxf(a.largest, b.largest);
  return {largest, __fadd_rn(__fmul_rn(a.sum, __expf(a.largest - largest)),
                             __fmul_rn(b.sum, __expf(b.largest - largest)))};
}

__device__ __forceinline__ Exponentials CombineOverWarp(Exponentials x) {
#pragma unroll
  for (int with = 16; with > 0; with /= 2) {
    const Exponentials other = {__shfl_xor_sync(0xffffffffu, x.largest, with),
                                __shfl_xor_sync(0xffffffffu, x.sum, with)};
    x = Combine(x, other);
  }
  return x;
}

// Every thread gets the same, combined in a fixed order.
__device__ __forceinline__ Exponentials CombineOverBlock(Exponentials x) {
  __shared__ Exponentials of_warps[32];
  const unsigned lane = threadIdx.x % 32;
  x = CombineOverWarp(x);
  if (lane == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  return CombineOverWarp(lane < blockDim.x / 32 ? of_warps[lane] : OfNoLogits());
}

template <int kCount>
__device__ __forceinline__ Exponentials MyExponentials(int vocabulary, const BFloat16Bits* logits) {
  Exponentials mine = OfNoLogits();
  const int step = static_cast<int>(blockDim.x) * kCount;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) * kCount; i < vocabulary; i += step) {
    const auto x = LoadBFloat16<kCount>(logits + i);
    float largest = mine.largest;
#pragma unroll
    for (int j = 0; j < kCount; ++j) largest = fmaxf(largest, x.x[j]);
    float sum = mine.sum * __expf(mine.largest - largest);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum += __expf(x.x[j] - largest);
    mine = {largest, sum};
  }
  return mine;
}

template <int kCount>
__global__ void __launch_bounds__(kMaxThreads)
    CrossEntropyKernel(int vocabulary, const int32_t* __restrict__ targets, float scale,
                       BFloat16Bits* all_logits, float* __restrict__ losses) {
  const int64_t row = blockIdx.x;
  BFloat16Bits* const logits = all_logits + row * vocabulary;
  const int target = targets[row];
  // Before another thread overwrites it, which is after the barrier.
  const float target_logit = FromBFloat16(logits[target]);
  const Exponentials all = CombineOverBlock(MyExponentials<kCount>(vocabulary, logits));
  if (threadIdx.x == 0) losses[row] = logf(all.sum) + (all.largest - target_logit);

  const float inverse = 1.0f / all.sum;
  const int step = static_cast<int>(blockDim.x) * kCount;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) * kCount; i < vocabulary; i += step) {
    auto x = LoadBFloat16<kCount>(logits + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float probability = __expf(x.x[j] - all.largest) * inverse;
      x.x[j] = (i + j == target ? probability - 1.0f : probability) * scale;
    }
    StoreBFloat16<kCount>(logits + i, x);
  }
}

constexpr unsigned kSumThreads = 256;

// One block: thread t adds every kSumThreads-th loss from t on, then pairs of threads are added.
__global__ void __launch_bounds__(kSumThreads)
    SumKernel(int64_t rows, const float* __restrict__ losses, bool add, double* sum) {
  __shared__ double of_threads[kSumThreads];
  const int thread = static_cast<int>(threadIdx.x);
  double mine = 0;
#pragma unroll 8
  for (int64_t row = thread; row < rows; row += kSumThreads) mine += losses[row];
  const double all = SumOfBlock(mine, of_threads);
  if (thread == 0) *sum = add ? *sum + all : all;
}

unsigned ThreadsFor(int packs) {
  return packs >= kMaxThreads ? kMaxThreads : static_cast<unsigned>((packs + 31) / 32 * 32);
}

}  // namespace

absl::Status CrossEntropy(DeviceStream& stream, int64_t rows, int vocabulary,
                          const int32_t* targets, float scale, BFloat16Bits* logits,
                          float* losses) {
  const bool packs = vocabulary % kPack == 0 && HoldsPacks(logits, kPack, sizeof(BFloat16Bits));
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(rows)),
                     .threads = ThreadsFor(packs ? vocabulary / kPack : vocabulary)};
  return Launch(stream, "cross-entropy", grid,
                packs ? &CrossEntropyKernel<kPack> : &CrossEntropyKernel<1>, vocabulary, targets,
                scale, logits, losses);
}

absl::Status SumLosses(DeviceStream& stream, int64_t rows, const float* losses, bool add,
                       double* sum) {
  return Launch(stream, "sum losses", Grid{.threads = kSumThreads}, &SumKernel, rows, losses, add,
                sum);
}

}  // namespace ballast::worker::cuda
