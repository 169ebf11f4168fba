#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/cuda/kernels/adam.h"
#include "gpu_worker/cuda/numeric.cuh"

namespace ballast::worker::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kPack = 4;
constexpr float kLeastNormal = 0x1p-126f;

__device__ __forceinline__ float Z(float x) { return fabsf(x) < kLeastNormal ? 0.0f : x; }
__device__ __forceinline__ float P(float x) { return fabsf(x) <= kLeastNormal ? 0.0f : x; }
__device__ __forceinline__ float Product(float a, float b) { return P(__fmul_rn(a, b)); }

struct Element {
  float gradient;
  float master;
  float exp_avg;
  float exp_avg_sq;
  float max_exp_avg_sq;
};

// common/rules/adam.h, term by term. The intrinsics keep the compiler from fusing.
__device__ __forceinline__ void UpdateElement(const AdamScalars& s, bool amsgrad, Element& e) {
  float g = Product(Z(e.gradient), s.multiplier);

  float w = Z(e.master);
  if (s.weight_decay_kind == WeightDecay::kL2) g = Z(__fadd_rn(g, Product(s.weight_decay, w)));
  if (s.weight_decay_kind == WeightDecay::kDecoupled) w = Product(w, s.decay);

  e.exp_avg = Z(__fadd_rn(Product(s.beta1, Z(e.exp_avg)), Product(s.one_minus_beta1, g)));
  e.exp_avg_sq =
      Z(__fadd_rn(Product(s.beta2, Z(e.exp_avg_sq)), Product(Product(s.one_minus_beta2, g), g)));
  float v = e.exp_avg_sq;
  if (amsgrad) {
    const float vm = Z(e.max_exp_avg_sq);
    if (v < vm || vm != vm) v = vm;
    e.max_exp_avg_sq = v;
  }

  const float d = __fadd_rn(__fmul_rn(__fsqrt_rn(v), s.inverse_sqrt_bias_correction2), s.eps);
  e.master = Z(__fsub_rn(w, Product(s.step_size, P(__fdiv_rn(e.exp_avg, d)))));
}

template <int kCount>
__device__ __forceinline__ void UpdateElements(const AdamRun& run, int64_t begin) {
  const bool amsgrad = run.max_exp_avg_sq != nullptr;
  const auto gradient = LoadWire<kCount>(run.gradient, run.gradient_dtype, begin);
  auto master = LoadFloats<kCount>(run.master + begin);
  auto exp_avg = LoadFloats<kCount>(run.exp_avg + begin);
  auto exp_avg_sq = LoadFloats<kCount>(run.exp_avg_sq + begin);
  Floats<kCount> max_exp_avg_sq = {};
  if (amsgrad) max_exp_avg_sq = LoadFloats<kCount>(run.max_exp_avg_sq + begin);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    Element e = {gradient.x[i], master.x[i], exp_avg.x[i], exp_avg_sq.x[i], max_exp_avg_sq.x[i]};
    UpdateElement(run.scalars, amsgrad, e);
    master.x[i] = e.master;
    exp_avg.x[i] = e.exp_avg;
    exp_avg_sq.x[i] = e.exp_avg_sq;
    max_exp_avg_sq.x[i] = e.max_exp_avg_sq;
  }
  StoreFloats<kCount>(run.new_master + begin, master);
  StoreFloats<kCount>(run.new_exp_avg + begin, exp_avg);
  StoreFloats<kCount>(run.new_exp_avg_sq + begin, exp_avg_sq);
  if (amsgrad) StoreFloats<kCount>(run.new_max_exp_avg_sq + begin, max_exp_avg_sq);
  if (run.shard != nullptr) StoreWire<kCount>(run.shard, run.shard_dtype, begin, master);
}

// Arrays may be the same, so nothing is __restrict__; a thread reads its elements before it writes
// any.
__global__ void __launch_bounds__(kThreads) UpdateKernel(AdamRun run, bool packs) {
  const int64_t begin = ThreadOfGrid() * kPack;
  if (packs && begin + kPack <= run.elements) {
    UpdateElements<kPack>(run, begin);
    return;
  }
  for (int64_t i = begin; i < begin + kPack && i < run.elements; ++i) UpdateElements<1>(run, i);
}

constexpr int kLanes = 16;  // The lanes of a block of gradients, as in gradient_norm.h.

__global__ void __launch_bounds__(kThreads)
    BlockSumsKernel(int runs, const BlockRun* __restrict__ table, int64_t blocks,
                    double* __restrict__ sums) {
  const int64_t block = ThreadOfGrid() / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  double sum = 0;
  if (block < blocks) {
    int first = 0;  // The block's run is in [first, end).
    for (int end = runs; end - first > 1;) {
      const int middle = first + (end - first) / 2;
      (table[middle].first_block <= block ? first : end) = middle;
    }
    const BlockRun run = table[first];
    const int64_t begin = (block - run.first_block) * kBlockElements + lane;
    if (begin - lane + kBlockElements <= run.elements) {
#pragma unroll
      for (int i = 0; i < kBlockElements; i += kLanes) {
        const double value = LoadWire<1>(run.gradient, run.dtype, begin + i).x[0];
        sum = __dadd_rn(sum, __dmul_rn(value, value));
      }
    } else {
      for (int64_t i = begin; i < run.elements; i += kLanes) {
        const double value = LoadWire<1>(run.gradient, run.dtype, i).x[0];
        sum = __dadd_rn(sum, __dmul_rn(value, value));
      }
    }
  }
  // Lane l gets l and l + with; the others' sums are not used.
#pragma unroll
  for (int with = kLanes / 2; with > 0; with /= 2) {
    sum = __dadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, with));
  }
  if (block < blocks && lane == 0) sums[block] = sum;
}

template <int kCount>
__device__ __forceinline__ void AddElements(const std::byte* gradient, DType dtype, bool assign,
                                            float* sum, int64_t begin) {
  auto values = LoadWire<kCount>(gradient, dtype, begin);
  if (!assign) {
    const auto before = LoadFloats<kCount>(sum + begin);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values.x[i] = __fadd_rn(before.x[i], values.x[i]);
  }
  StoreFloats<kCount>(sum + begin, values);
}

__global__ void __launch_bounds__(kThreads)
    AddWireKernel(int64_t elements, bool packs, const std::byte* gradient, DType dtype, bool assign,
                  float* sum) {
  const int64_t begin = ThreadOfGrid() * kPack;
  if (packs && begin + kPack <= elements) {
    AddElements<kPack>(gradient, dtype, assign, sum, begin);
    return;
  }
  for (int64_t i = begin; i < begin + kPack && i < elements; ++i) {
    AddElements<1>(gradient, dtype, assign, sum, i);
  }
}

Grid GridOfPacks(int64_t elements) { return GridFor((elements + kPack - 1) / kPack, kThreads); }

}  // namespace

absl::Status UpdateAdam(DeviceStream& stream, const AdamRun& run) {
  bool packs = HoldsPacks(run.gradient, kPack, SizeBytes(run.gradient_dtype)) &&
               HoldsPacks(run.shard, kPack, SizeBytes(run.shard_dtype));
  for (const float* plane : {run.master, run.exp_avg, run.exp_avg_sq, run.max_exp_avg_sq}) {
    packs = packs && HoldsPacks(plane, kPack, 4);
  }
  for (const float* plane :
       {run.new_master, run.new_exp_avg, run.new_exp_avg_sq, run.new_max_exp_avg_sq}) {
    packs = packs && HoldsPacks(plane, kPack, 4);
  }
  return Launch(stream, "update", GridOfPacks(run.elements), &UpdateKernel, run, packs);
}

absl::Status BlockSumsOfSquares(DeviceStream& stream, int runs, const BlockRun* table,
                                int64_t blocks, double* sums) {
  static_assert(kBlockElements % kLanes == 0);
  return Launch(stream, "block sums", GridFor(blocks * kLanes, kThreads), &BlockSumsKernel, runs,
                table, blocks, sums);
}

absl::Status AddWireGradient(DeviceStream& stream, int64_t elements, const std::byte* gradient,
                             DType dtype, bool assign, float* sum) {
  const bool packs = HoldsPacks(gradient, kPack, SizeBytes(dtype)) && HoldsPacks(sum, kPack, 4);
  return Launch(stream, "add wire gradient", GridOfPacks(elements), &AddWireKernel, elements, packs,
                gradient, dtype, assign, sum);
}

}  // namespace ballast::worker::cuda
