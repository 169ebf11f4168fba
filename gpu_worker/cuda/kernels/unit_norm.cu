#include "gpu_worker/cuda/kernels/unit_norm.h"

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/numeric.cuh"

namespace ballast::worker::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kElementsOfThread = 16;  // In the sum, for large matrices more.
static_assert(kNormSums <= kThreads);

__global__ void __launch_bounds__(kThreads)
    SumSquaresKernel(int64_t elements, const BFloat16Bits* __restrict__ x, double* sums) {
  __shared__ double of_threads[kThreads];
  double mine = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = ThreadOfGrid(); i < elements; i += stride) {
    const double value = FromBFloat16(x[i]);
    mine += value * value;
  }
  const double sum = SumOfBlock(mine, of_threads);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    DivideKernel(int64_t elements, float eps, unsigned sum_count, const double* sums,
                 BFloat16Bits* x) {
  __shared__ double of_threads[kThreads];
  const double sum = SumOfBlock(threadIdx.x < sum_count ? sums[threadIdx.x] : 0, of_threads);
  const float norm = FromBFloat16(ToBFloat16(sqrtf(static_cast<float>(sum))));
  const float divisor = fmaxf(norm, FromBFloat16(ToBFloat16(eps)));
  const int64_t i = ThreadOfGrid();
  if (i < elements) x[i] = ToBFloat16(__fdiv_rn(FromBFloat16(x[i]), divisor));
}

}  // namespace

absl::Status DivideByNorm(DeviceStream& stream, int64_t elements, float eps, BFloat16Bits* x,
                          double* sums) {
  const Grid whole = GridFor((elements + kElementsOfThread - 1) / kElementsOfThread, kThreads);
  const Grid grid = {.blocks = dim3(whole.blocks.x < kNormSums ? whole.blocks.x : kNormSums),
                     .threads = kThreads};
  BALLAST_RETURN_IF_ERROR(
      Launch(stream, "sum of squares", grid, &SumSquaresKernel, elements, x, sums));
  return Launch(stream, "divide by norm", GridFor(elements, kThreads), &DivideKernel, elements, eps,
                grid.blocks.x, sums, x);
}

}  // namespace ballast::worker::cuda
