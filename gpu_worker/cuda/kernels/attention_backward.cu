// With p[i][j] computed again from the scores and their logsumexp (Dao 2023, algorithm 2):
//
//   delta[i] = d_out[i] . out[i]
//   ds[i][j] = p[i][j] (d_out[i] . v[j] - delta[i])
//   dq[i]    = sum over j of ds[i][j] k[j] / sqrt(head_width)
//   dk[j]    = sum over i of ds[i][j] q[i] / sqrt(head_width)
//   dv[j]    = sum over i of p[i][j] d_out[i]
//
// Two kernels, each with a fixed order of its sums: one whose blocks own queries, for delta and dq,
// and after it one whose blocks own keys, for dk and dv.
#include <cmath>

#include "gpu_worker/cuda/kernels/attention.h"
#include "gpu_worker/cuda/kernels/attention_rows.cuh"
#include "gpu_worker/cuda/kernels/attention_tiles.cuh"
#include "gpu_worker/cuda/launch.cuh"
#include "gpu_worker/cuda/mma.cuh"

namespace ballast::worker::cuda {
namespace attention {
namespace {

struct BackwardArgs {
  AttentionShape shape;
  float scale = 0;  // Multiplies the scores.
  const BFloat16Bits* qkv = nullptr;
  const BFloat16Bits* out = nullptr;
  const float* logsumexp = nullptr;
  const BFloat16Bits* d_out = nullptr;
  float* delta = nullptr;  // In the shape of logsumexp.
  BFloat16Bits* d_qkv = nullptr;
};

// The elements of two packed pairs multiplied, and summed.
__device__ __forceinline__ float PairProduct(uint32_t a, uint32_t b) {
  return __uint_as_float(a << 16) * __uint_as_float(b << 16) +
         __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
}

template <int kWidth>
__device__ __forceinline__ PerRow<kWidth> RowProducts(const OwnedRows<kWidth>& a,
                                                      const OwnedRows<kWidth>& b) {
  PerRow<kWidth> products;
#pragma unroll
  for (int tile = 0; tile < Sizes<kWidth>::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0;
#pragma unroll
      for (int step = 0; step < Sizes<kWidth>::kDepthSteps; ++step) {
        const uint32_t* x = a.a[tile][step].x;
        const uint32_t* y = b.a[tile][step].x;
        sum += PairProduct(x[half], y[half]) + PairProduct(x[half + 2], y[half + 2]);
      }
      products.x[tile][half] = SumOfRow(sum);
    }
  }
  return products;
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads, 2) QueryGradientKernel(BackwardArgs args) {
  const int context = args.shape.context;
  const BlockOfHead block =
      FindBlock(args.shape, Sizes<kWidth>::kBlockRows, LongestWork::kLastRows);
  const int first_query = FirstOwnedRow<kWidth>(block);
  const int last_query = first_query + Sizes<kWidth>::kWarpRows - 1;

  const TilePairs<kWidth> keys_values{RowsOfQkv(args.shape, block, args.qkv, 1),
                                      RowsOfQkv(args.shape, block, args.qkv, 2),
                                      DynamicShared<BFloat16Bits>()};
  keys_values.Copy(0, 0);

  const auto d_out = LoadOwnedRows<kWidth>(RowsOfOut(args.shape, block, args.d_out), first_query);
  const PerRow<kWidth> delta = RowProducts<kWidth>(
      d_out, LoadOwnedRows<kWidth>(RowsOfOut(args.shape, block, args.out), first_query));
  PerRow<kWidth> logsumexp_log2 = AllRows<kWidth>(0);
#pragma unroll
  for (int tile = 0; tile < Sizes<kWidth>::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = LaneRow(first_query, tile, half);
      if (row >= context) continue;
      logsumexp_log2.x[tile][half] = args.logsumexp[block.index * context + row] * kLog2E;
      if (LaneColumn() == 0) args.delta[block.index * context + row] = delta.x[tile][half];
    }
  }
  const auto queries =
      LoadOwnedRows<kWidth>(RowsOfQkv(args.shape, block, args.qkv, 0), first_query);
  OwnedSums<kWidth> d_queries;

  const float scale_log2 = args.scale * kLog2E;
  const int keys_end = KeysEnd<kWidth>(args.shape, block);
  for (int first_key = 0, stage = 0; first_key < keys_end; first_key += kTileRows, stage ^= 1) {
    WaitForCopies<0>();
    __syncthreads();  // This tile has arrived, and no thread uses the one before.
    if (first_key + kTileRows < keys_end) keys_values.Copy(first_key + kTileRows, stage ^ 1);
    if (first_query >= context) continue;
#pragma unroll 1
    for (int row = 0; row < kTileRows; row += 16) {
      if (first_key + row > last_query) break;
      Part<kWidth> scores = Products<kWidth>(queries, keys_values.A(stage), row);
      Part<kWidth> d_scores = Products<kWidth>(d_out, keys_values.B(stage), row);
      if (first_key + row + 15 > first_query) {
        MaskLaterKeys<RowsAre::kQueries>(first_query, first_key + row, scores);
      }
#pragma unroll
      for (int tile = 0; tile < Sizes<kWidth>::kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int half = i / 2 % 2;
          const float p =
              FastExp2(scores.x[tile][i / 4].x[i % 4] * scale_log2 - logsumexp_log2.x[tile][half]);
          float& d = d_scores.x[tile][i / 4].x[i % 4];
          d = p * (d - delta.x[tile][half]);
        }
      }
      AddWeightedRows<kWidth>(d_scores, keys_values.A(stage), row, d_queries);
    }
  }
  StoreOwnedRows<kWidth>(d_queries, AllRows<kWidth>(args.scale),
                         RowsOfQkv(args.shape, block, args.d_qkv, 0), first_query);
}

// Statistics of a tile of queries.
struct QueryStatistics {
  float logsumexp[kTileRows];
  float delta[kTileRows];
};

// Begins copying those of queries first_query ... first_query + kTileRows - 1; by all threads.
__device__ __forceinline__ void CopyStatistics(const BackwardArgs& args, const BlockOfHead& block,
                                               int first_query, QueryStatistics* to) {
  static_assert(kThreads == 2 * kTileRows);
  const int row = static_cast<int>(threadIdx.x) % kTileRows;
  const bool of_delta = threadIdx.x >= kTileRows;
  const bool present = first_query + row < args.shape.context;
  const float* from = (of_delta ? args.delta : args.logsumexp) + block.index * args.shape.context +
                      (present ? first_query + row : 0);
  CopyAsync<4>(to, threadIdx.x * sizeof(float), from, present);
}

template <int kWidth>
size_t KeyGradientSharedBytes() {
  return TilesBytes<kWidth>() + 2 * sizeof(QueryStatistics);
}

// All registers that a thread can have are taken while a tile is worked on; the few values that do
// not fit are those that copy the next tile and store the results, outside the inner loop.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 2) KeyGradientKernel(BackwardArgs args) {
  const int context = args.shape.context;
  const BlockOfHead block =
      FindBlock(args.shape, Sizes<kWidth>::kBlockRows, LongestWork::kFirstRows);
  const int first_key = FirstOwnedRow<kWidth>(block);
  const int last_key = first_key + Sizes<kWidth>::kWarpRows - 1;

  const TilePairs<kWidth> queries_d_out{RowsOfQkv(args.shape, block, args.qkv, 0),
                                        RowsOfOut(args.shape, block, args.d_out),
                                        DynamicShared<BFloat16Bits>()};
  // One set for each of two tiles.
  auto* const statistics = reinterpret_cast<QueryStatistics*>(queries_d_out.End());
  const auto copy = [&](int first_query, int stage) {
    CopyStatistics(args, block, first_query, statistics + stage);
    queries_d_out.Copy(first_query, stage);
  };
  copy(block.first_row, 0);

  const auto keys = LoadOwnedRows<kWidth>(RowsOfQkv(args.shape, block, args.qkv, 1), first_key);
  const auto values = LoadOwnedRows<kWidth>(RowsOfQkv(args.shape, block, args.qkv, 2), first_key);
  OwnedSums<kWidth> d_keys;
  OwnedSums<kWidth> d_values;

  const float scale_log2 = args.scale * kLog2E;
  // Queries past the context are zeros, and so is all that they add.
  for (int first_query = block.first_row, stage = 0; first_query < context;
       first_query += kTileRows, stage ^= 1) {
    WaitForCopies<0>();
    __syncthreads();  // This tile has arrived, and no thread uses the one before.
    if (first_query + kTileRows < context) copy(first_query + kTileRows, stage ^ 1);
    if (first_key >= context) continue;
#pragma unroll 1
    for (int row = 0; row < kTileRows; row += 16) {
      if (first_query + row + 15 < first_key) continue;
      Part<kWidth> p = Products<kWidth>(keys, queries_d_out.A(stage), row);
      Part<kWidth> d_scores = Products<kWidth>(values, queries_d_out.B(stage), row);
      if (first_query + row < last_key) {
        MaskLaterKeys<RowsAre::kKeys>(first_key, first_query + row, p);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = row + i / 2 * 8 + LaneColumn() + i % 2;
        const float logsumexp_log2 = statistics[stage].logsumexp[query] * kLog2E;
        const float delta = statistics[stage].delta[query];
#pragma unroll
        for (int j = 0; j < 2 * Sizes<kWidth>::kRowTiles; ++j) {
          float& x = p.x[j / 2][i / 2].x[j % 2 * 2 + i % 2];
          float& d = d_scores.x[j / 2][i / 2].x[j % 2 * 2 + i % 2];
          x = FastExp2(x * scale_log2 - logsumexp_log2);
          d = x * (d - delta);
        }
      }
      AddWeightedRows<kWidth>(p, queries_d_out.B(stage), row, d_values);
      AddWeightedRows<kWidth>(d_scores, queries_d_out.A(stage), row, d_keys);
    }
  }
  StoreOwnedRows<kWidth>(d_keys, AllRows<kWidth>(args.scale),
                         RowsOfQkv(args.shape, block, args.d_qkv, 1), first_key);
  StoreOwnedRows<kWidth>(d_values, AllRows<kWidth>(1), RowsOfQkv(args.shape, block, args.d_qkv, 2),
                         first_key);
}

template <int kWidth>
absl::Status LaunchBackward(DeviceStream& stream, const BackwardArgs& args) {
  Grid grid{.blocks = GridOfHeads(args.shape, Sizes<kWidth>::kBlockRows),
            .threads = kThreads,
            .shared_bytes = TilesBytes<kWidth>()};
  absl::Status status =
      Launch(stream, "AttentionQueryGradient", grid, &QueryGradientKernel<kWidth>, args);
  if (!status.ok()) return status;
  grid.shared_bytes = KeyGradientSharedBytes<kWidth>();
  return Launch(stream, "AttentionKeyGradient", grid, &KeyGradientKernel<kWidth>, args);
}

}  // namespace
}  // namespace attention

size_t AttentionScratchBytes(const AttentionShape& shape) {
  return static_cast<size_t>(shape.rows()) * shape.heads * sizeof(float);
}

absl::Status AttentionBackward(DeviceStream& stream, const AttentionShape& shape,
                               const BFloat16Bits* qkv, const BFloat16Bits* out,
                               const float* logsumexp, const BFloat16Bits* d_out,
                               BFloat16Bits* d_qkv, float* scratch) {
  if (absl::Status status = ValidateAttention(shape); !status.ok()) return status;
  const int head_width = shape.width / shape.heads;
  const attention::BackwardArgs args{.shape = shape,
                                     .scale = attention::ScoreScale(head_width),
                                     .qkv = qkv,
                                     .out = out,
                                     .logsumexp = logsumexp,
                                     .d_out = d_out,
                                     .delta = scratch,
                                     .d_qkv = d_qkv};
  if (head_width == 64) return attention::LaunchBackward<64>(stream, args);
  return attention::LaunchBackward<128>(stream, args);
}

}  // namespace ballast::worker::cuda
