// A block owns queries, and goes through the keys up to the last of them in order, with the softmax
// of what it has seen so far: its largest score, and sums of exp(score - largest), alone and times
// the values (Dao 2023, algorithm 1).
#include <cmath>

#include "absl/strings/str_cat.h"
#include "gpu_worker/cuda/kernels/attention.h"
#include "gpu_worker/cuda/kernels/attention_rows.cuh"
#include "gpu_worker/cuda/kernels/attention_tiles.cuh"
#include "gpu_worker/cuda/launch.cuh"
#include "gpu_worker/cuda/mma.cuh"

namespace ballast::worker::cuda {
namespace attention {
namespace {

struct ForwardArgs {
  AttentionShape shape;
  float scale = 0;  // Multiplies the scores.
  const BFloat16Bits* qkv = nullptr;
  BFloat16Bits* out = nullptr;
  float* logsumexp = nullptr;
};

constexpr int kParts = kTileRows / 16;

template <int kWidth>
struct Scores {
  Part<kWidth> part[kParts];
};

// What a lane knows of its rows. `largest` is not scaled, `sum` is of the lane's columns alone.
template <int kWidth>
struct RowStatistics {
  PerRow<kWidth> largest = AllRows<kWidth>(-INFINITY);
  PerRow<kWidth> sum = AllRows<kWidth>(0);
};

// Over the four lanes that share rows.
__device__ __forceinline__ float MaxOfRow(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Scores become exp(score - largest so far), and what was summed before is brought to the same
// largest. Key 0 counts for every query, so `largest` is finite from the first tile on.
template <int kWidth>
__device__ __forceinline__ void SoftmaxTile(float scale, Scores<kWidth>& scores,
                                            RowStatistics<kWidth>& rows, OwnedSums<kWidth>& sums) {
  const float scale_log2 = scale * kLog2E;
#pragma unroll
  for (int tile = 0; tile < Sizes<kWidth>::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = rows.largest.x[tile][half];
#pragma unroll
      for (int i = 0; i < 2 * kParts; ++i) {
        const float* x = scores.part[i / 2].x[tile][i % 2].x + 2 * half;
        largest = fmaxf(largest, fmaxf(x[0], x[1]));
      }
      largest = MaxOfRow(largest);
      const float correction = FastExp2((rows.largest.x[tile][half] - largest) * scale_log2);
      rows.largest.x[tile][half] = largest;

      const float offset = largest * scale_log2;
      float sum = rows.sum.x[tile][half] * correction;
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
        float& x = scores.part[i / 4].x[tile][i / 2 % 2].x[2 * half + i % 2];
        x = FastExp2(x * scale_log2 - offset);
        sum += x;
      }
      rows.sum.x[tile][half] = sum;
#pragma unroll
      for (int column = 0; column < Sizes<kWidth>::kColumnTiles; ++column) {
        float* x = sums.x[tile][column].x + 2 * half;
        x[0] *= correction;
        x[1] *= correction;
      }
    }
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads, 2) ForwardKernel(ForwardArgs args) {
  const BlockOfHead block =
      FindBlock(args.shape, Sizes<kWidth>::kBlockRows, LongestWork::kLastRows);
  const auto all_queries = RowsOfQkv(args.shape, block, args.qkv, 0);
  const int first_query = FirstOwnedRow<kWidth>(block);
  const int last_query = first_query + Sizes<kWidth>::kWarpRows - 1;

  const TilePairs<kWidth> keys_values{RowsOfQkv(args.shape, block, args.qkv, 1),
                                      RowsOfQkv(args.shape, block, args.qkv, 2),
                                      DynamicShared<BFloat16Bits>()};
  keys_values.Copy(0, 0);

  const OwnedRows<kWidth> queries = LoadOwnedRows<kWidth>(all_queries, first_query);
  OwnedSums<kWidth> sums;
  RowStatistics<kWidth> rows;

  const int keys_end = KeysEnd<kWidth>(args.shape, block);
  for (int first_key = 0, stage = 0; first_key < keys_end; first_key += kTileRows, stage ^= 1) {
    WaitForCopies<0>();
    __syncthreads();  // This tile has arrived, and no thread uses the one before.
    if (first_key + kTileRows < keys_end) keys_values.Copy(first_key + kTileRows, stage ^ 1);
    if (first_key > last_query || first_query >= args.shape.context) continue;
    Scores<kWidth> scores;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      scores.part[i] = Products<kWidth>(queries, keys_values.A(stage), 16 * i);
    }
    if (first_key + kTileRows - 1 > first_query) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        MaskLaterKeys<RowsAre::kQueries>(first_query, first_key + 16 * i, scores.part[i]);
      }
    }
    SoftmaxTile<kWidth>(args.scale, scores, rows, sums);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      AddWeightedRows<kWidth>(scores.part[i], keys_values.B(stage), 16 * i, sums);
    }
  }

  PerRow<kWidth> inverse;
#pragma unroll
  for (int tile = 0; tile < Sizes<kWidth>::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = SumOfRow(rows.sum.x[tile][half]);
      inverse.x[tile][half] = 1 / sum;
      const int row = LaneRow(first_query, tile, half);
      if (LaneColumn() == 0 && row < args.shape.context) {
        args.logsumexp[block.index * args.shape.context + row] =
            rows.largest.x[tile][half] * args.scale + logf(sum);
      }
    }
  }
  StoreOwnedRows<kWidth>(sums, inverse, RowsOfOut(args.shape, block, args.out), first_query);
}

template <int kWidth>
absl::Status LaunchForward(DeviceStream& stream, const ForwardArgs& args) {
  const Grid grid{.blocks = GridOfHeads(args.shape, Sizes<kWidth>::kBlockRows),
                  .threads = kThreads,
                  .shared_bytes = TilesBytes<kWidth>()};
  return Launch(stream, "AttentionForward", grid, &ForwardKernel<kWidth>, args);
}

}  // namespace
}  // namespace attention

absl::Status ValidateAttention(const AttentionShape& shape) {
  if (shape.sequences < 0 || shape.context < 1 || shape.heads < 1) {
    return absl::InvalidArgumentError(absl::StrCat("attention: ", shape.sequences, " sequences of ",
                                                   shape.context, " tokens, ", shape.heads,
                                                   " heads: a context and heads are needed"));
  }
  if (shape.width != shape.heads * 64 && shape.width != shape.heads * 128) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attention: ", shape.heads, " heads share width ", shape.width,
        ": the GPU's kernels want heads of width 64 or 128; set width to heads * 64 or heads * ",
        "128"));
  }
  return absl::OkStatus();
}

absl::Status AttentionForward(DeviceStream& stream, const AttentionShape& shape,
                              const BFloat16Bits* qkv, BFloat16Bits* out, float* logsumexp) {
  if (absl::Status status = ValidateAttention(shape); !status.ok()) return status;
  const int head_width = shape.width / shape.heads;
  const attention::ForwardArgs args{.shape = shape,
                                    .scale = attention::ScoreScale(head_width),
                                    .qkv = qkv,
                                    .out = out,
                                    .logsumexp = logsumexp};
  if (head_width == 64) return attention::LaunchForward<64>(stream, args);
  return attention::LaunchForward<128>(stream, args);
}

}  // namespace ballast::worker::cuda
