// Rows are normalised by a warp each, which keeps its row in shared memory; the columns of a
// gradient are summed by a second kernel, over parts of the rows, and a third, over the parts.
#include <algorithm>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/layer_norm.h"
#include "gpu_worker/cuda/numeric.cuh"

namespace ballast::worker::cuda {
namespace {

constexpr int kWarps = 4;  // And rows, of a block.
constexpr float kEpsilon = 1e-5f;

// A warp's lane has elements Column() ... Column() + kCount - 1 of each kCount * 32.
template <int kCount>
__device__ __forceinline__ int FirstColumn() {
  return static_cast<int>(threadIdx.x) % 32 * kCount;
}
template <int kCount>
inline constexpr int kColumnStep = kCount * 32;

// The warp's row of `rows_of_each` in shared memory. A lane reads only what it wrote itself.
__device__ __forceinline__ BFloat16Bits* SharedRow(int width, int rows_of_each, int which) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Rows begin at multiples of 16 bytes.
  const int stride = (width + 7) / 8 * 8;
  return DynamicShared<BFloat16Bits>() + (warp * rows_of_each + which) * stride;
}

inline size_t SharedRowBytes(int width) {
  return size_t{(static_cast<size_t>(width) + 7) / 8} * 16;
}

__device__ __forceinline__ int64_t RowOfWarp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

inline Grid GridOfRows(const LayerNormShape& shape, int shared_rows) {
  return {.blocks = dim3(static_cast<unsigned>((shape.rows + kWarps - 1) / kWarps)),
          .threads = kWarps * 32,
          .shared_bytes = kWarps * shared_rows * SharedRowBytes(shape.width)};
}

template <int kCount>
__global__ void __launch_bounds__(kWarps * 32)
    ForwardKernel(LayerNormShape shape, LayerNormForwardArgs args) {
  const int64_t row = RowOfWarp();
  if (row >= shape.rows) return;
  const int width = shape.width;
  const int64_t begin = row * width;
  BFloat16Bits* const kept = SharedRow(width, 1, 0);

  float sum = 0;
  for (int i = FirstColumn<kCount>(); i < width; i += kColumnStep<kCount>) {
    auto x = LoadBFloat16<kCount>(args.x + begin + i);
    if (args.residual != nullptr) {
      const auto residual = LoadBFloat16<kCount>(args.residual + begin + i);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        x.x[j] = FromBFloat16(ToBFloat16(x.x[j] + residual.x[j]));
      }
      StoreBFloat16<kCount>(args.sum + begin + i, x);
    }
    StoreBFloat16<kCount>(kept + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum += x.x[j];
  }
  const float mean = WarpSum(sum) / static_cast<float>(width);

  float squares = 0;
  for (int i = FirstColumn<kCount>(); i < width; i += kColumnStep<kCount>) {
    const auto x = LoadBFloat16<kCount>(kept + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares += (x.x[j] - mean) * (x.x[j] - mean);
  }
  const float rstd = 1.0f / sqrtf(WarpSum(squares) / static_cast<float>(width) + kEpsilon);

  for (int i = FirstColumn<kCount>(); i < width; i += kColumnStep<kCount>) {
    auto x = LoadBFloat16<kCount>(kept + i);
    const auto weight = LoadBFloat16<kCount>(args.weight + i);
    const auto bias = LoadBFloat16<kCount>(args.bias + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      x.x[j] = (x.x[j] - mean) * rstd * weight.x[j] + bias.x[j];
    }
    StoreBFloat16<kCount>(args.out + begin + i, x);
  }
  if (threadIdx.x % 32 == 0) {
    args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
}

// With n = (x - mean) * rstd and g = d_out * weight:
//   d_x = rstd * (g - mean over the row of g - n * mean over the row of g n)
template <int kCount>
__global__ void __launch_bounds__(kWarps * 32)
    InputGradientKernel(LayerNormShape shape, LayerNormBackwardArgs args) {
  const int64_t row = RowOfWarp();
  if (row >= shape.rows) return;
  const int width = shape.width;
  const int64_t begin = row * width;
  BFloat16Bits* const kept_d_out = SharedRow(width, 2, 0);
  BFloat16Bits* const kept_x = SharedRow(width, 2, 1);
  const float mean = args.mean[row];
  const float rstd = args.rstd[row];

  float sum = 0;
  float sum_normal = 0;
  for (int i = FirstColumn<kCount>(); i < width; i += kColumnStep<kCount>) {
    const auto d_out = LoadBFloat16<kCount>(args.d_out + begin + i);
    const auto x = LoadBFloat16<kCount>(args.x + begin + i);
    const auto weight = LoadBFloat16<kCount>(args.weight + i);
    StoreBFloat16<kCount>(kept_d_out + i, d_out);
    StoreBFloat16<kCount>(kept_x + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float g = d_out.x[j] * weight.x[j];
      sum += g;
      sum_normal += g * ((x.x[j] - mean) * rstd);
    }
  }
  const float mean_g = WarpSum(sum) / static_cast<float>(width);
  const float mean_normal = WarpSum(sum_normal) / static_cast<float>(width);

  for (int i = FirstColumn<kCount>(); i < width; i += kColumnStep<kCount>) {
    const auto d_out = LoadBFloat16<kCount>(kept_d_out + i);
    const auto x = LoadBFloat16<kCount>(kept_x + i);
    const auto weight = LoadBFloat16<kCount>(args.weight + i);
    Floats<kCount> d_stream = {};
    if (!args.assign) d_stream = LoadBFloat16<kCount>(args.d_stream + begin + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float normal = (x.x[j] - mean) * rstd;
      d_stream.x[j] += rstd * (d_out.x[j] * weight.x[j] - mean_g - normal * mean_normal);
    }
    StoreBFloat16<kCount>(args.d_stream + begin + i, d_stream);
  }
}

// The parts that rows are cut into follow from their number alone, so that sums are the same on
// every device: enough for all its multiprocessors, few enough to be added up at once.
constexpr int kMaxParts = 128;
constexpr int kMinPartRows = 32;
constexpr int kPartWarps = 8;  // Each has every eighth row of a part.

int64_t PartRows(int64_t rows) {
  return std::max<int64_t>(kMinPartRows, (rows + kMaxParts - 1) / kMaxParts);
}
int Parts(int64_t rows) { return static_cast<int>((rows + PartRows(rows) - 1) / PartRows(rows)); }

struct ColumnArgs {
  int64_t rows = 0;
  int columns = 0;
  int64_t part_rows = 0;
  const BFloat16Bits* d_out = nullptr;
  // They also give the sums of d_out times the normalised x.
  const BFloat16Bits* x = nullptr;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  // Parts x columns; after the sums, those times x.
  float* partial = nullptr;
  float* sums = nullptr;
  float* normal_sums = nullptr;
  bool add = false;  // To what is in both.
};

// Adds the warps' sums in order, and stores them.
template <int kCount>
__device__ __forceinline__ void StorePart(const Floats<kCount>& sum, int columns, float* to) {
  constexpr int kColumns = kColumnStep<kCount>;
  __shared__ float of_warps[kPartWarps][kColumns];
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int j = 0; j < kCount; ++j) of_warps[warp][FirstColumn<kCount>() + j] = sum.x[j];
  __syncthreads();
  const int first = static_cast<int>(blockIdx.x) * kColumns;
  for (int i = static_cast<int>(threadIdx.x); i < kColumns; i += kPartWarps * 32) {
    float total = of_warps[0][i];
#pragma unroll
    for (int w = 1; w < kPartWarps; ++w) total += of_warps[w][i];
    if (first + i < columns) to[first + i] = total;
  }
  __syncthreads();
}

// A block has kColumnStep columns of one part.
template <int kCount, bool kNormal>
__global__ void __launch_bounds__(kPartWarps * 32) PartsKernel(ColumnArgs args) {
  const int column = static_cast<int>(blockIdx.x) * kColumnStep<kCount> + FirstColumn<kCount>();
  const int64_t part = blockIdx.y;
  const int64_t begin = part * args.part_rows;
  const int64_t after = begin + args.part_rows;
  const int64_t end = after < args.rows ? after : args.rows;
  Floats<kCount> sum = {};
  Floats<kCount> normal_sum = {};
  if (column < args.columns) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.x / 32; row < end; row += kPartWarps) {
      const int64_t at = row * args.columns + column;
      const auto d_out = LoadBFloat16<kCount>(args.d_out + at);
#pragma unroll
      for (int j = 0; j < kCount; ++j) sum.x[j] += d_out.x[j];
      if constexpr (kNormal) {
        const auto x = LoadBFloat16<kCount>(args.x + at);
        const float mean = args.mean[row];
        const float rstd = args.rstd[row];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          normal_sum.x[j] += d_out.x[j] * ((x.x[j] - mean) * rstd);
        }
      }
    }
  }
  StorePart<kCount>(sum, args.columns, args.partial + part * args.columns);
  if constexpr (kNormal) {
    StorePart<kCount>(normal_sum, args.columns, args.partial + (gridDim.y + part) * args.columns);
  }
}

constexpr unsigned kTotalThreads = 128;

// A thread has one column; blockIdx.y: 0, the sums; 1, those times x.
__global__ void __launch_bounds__(kTotalThreads) TotalsKernel(ColumnArgs args, int parts) {
  const int64_t column = ThreadOfGrid();
  if (column >= args.columns) return;
  const int64_t which = blockIdx.y;
  const float* partial = args.partial + which * parts * args.columns + column;
  float total = 0;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) {
    total += partial[static_cast<int64_t>(part) * args.columns];
  }
  float* const to = (which == 0 ? args.sums : args.normal_sums) + column;
  *to = args.add ? *to + total : total;
}

template <int kCount, bool kNormal>
absl::Status SumColumns(DeviceStream& stream, ColumnArgs args) {
  const int parts = Parts(args.rows);
  args.part_rows = PartRows(args.rows);
  constexpr int kColumns = kColumnStep<kCount>;
  const Grid grid = {.blocks = dim3((args.columns + kColumns - 1) / kColumns, parts),
                     .threads = kPartWarps * 32};
  BALLAST_RETURN_IF_ERROR(
      Launch(stream, "column sums of parts", grid, &PartsKernel<kCount, kNormal>, args));
  Grid totals = GridFor(args.columns, kTotalThreads);
  totals.blocks.y = kNormal ? 2 : 1;
  return Launch(stream, "column sums", totals, &TotalsKernel, args, parts);
}

template <int kCount>
absl::Status Backward(DeviceStream& stream, const LayerNormShape& shape,
                      const LayerNormBackwardArgs& args) {
  BALLAST_RETURN_IF_ERROR(Launch(stream, "layer norm backward", GridOfRows(shape, 2),
                                 &InputGradientKernel<kCount>, shape, args));
  ColumnArgs columns;
  columns.rows = shape.rows;
  columns.columns = shape.width;
  columns.d_out = args.d_out;
  columns.x = args.x;
  columns.mean = args.mean;
  columns.rstd = args.rstd;
  columns.partial = args.scratch;
  columns.sums = args.bias_gradient;
  columns.normal_sums = args.weight_gradient;
  columns.add = args.add;
  return SumColumns<kCount, true>(stream, columns);
}

constexpr int kPack = 8;

bool RowsHoldPacks(int width, std::initializer_list<const BFloat16Bits*> tensors) {
  return width % kPack == 0 &&
         std::all_of(tensors.begin(), tensors.end(), [](const BFloat16Bits* tensor) {
           return HoldsPacks(tensor, kPack, sizeof(BFloat16Bits));
         });
}

}  // namespace

absl::Status LayerNormForward(DeviceStream& stream, const LayerNormShape& shape,
                              const LayerNormForwardArgs& args) {
  const bool packs = RowsHoldPacks(
      shape.width, {args.x, args.residual, args.weight, args.bias, args.sum, args.out});
  return Launch(stream, "layer norm", GridOfRows(shape, 1),
                packs ? &ForwardKernel<kPack> : &ForwardKernel<1>, shape, args);
}

size_t LayerNormScratchBytes(const LayerNormShape& shape) {
  return 2 * ColumnSumScratchBytes(shape.rows, shape.width);
}

absl::Status LayerNormBackward(DeviceStream& stream, const LayerNormShape& shape,
                               const LayerNormBackwardArgs& args) {
  const bool packs = RowsHoldPacks(shape.width, {args.d_out, args.x, args.weight, args.d_stream});
  return packs ? Backward<kPack>(stream, shape, args) : Backward<1>(stream, shape, args);
}

size_t ColumnSumScratchBytes(int64_t rows, int columns) {
  // Not Parts(rows), which is not always more for more rows.
  const int64_t parts = std::min<int64_t>(kMaxParts, (rows + kMinPartRows - 1) / kMinPartRows);
  return static_cast<size_t>(parts) * columns * sizeof(float);
}

absl::Status ColumnSum(DeviceStream& stream, int64_t rows, int columns, const BFloat16Bits* d_out,
                       float* gradient, bool add, float* scratch) {
  const ColumnArgs args = {.rows = rows,
                           .columns = columns,
                           .d_out = d_out,
                           .partial = scratch,
                           .sums = gradient,
                           .add = add};
  return RowsHoldPacks(columns, {d_out}) ? SumColumns<kPack, false>(stream, args)
                                         : SumColumns<1, false>(stream, args);
}

}  // namespace ballast::worker::cuda
