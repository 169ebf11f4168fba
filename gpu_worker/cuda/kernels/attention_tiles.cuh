// Tiles of rows in shared memory, and their products with the rows that a warp owns.
//
// A tile's 16-byte pieces are swizzled: piece c of row r lies at c ^ (r % 8), so that the eight
// rows of a matrix that a warp loads at once lie in different banks.
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_TILES_CUH_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_TILES_CUH_

#include <cmath>
#include <cstdint>

#include "gpu_worker/cuda/kernels/attention_rows.cuh"
#include "gpu_worker/cuda/launch.cuh"
#include "gpu_worker/cuda/mma.cuh"

namespace ballast::worker::cuda::attention {

inline constexpr int kPieceElements = 8;
inline constexpr float kLog2E = 1.44269504088896341f;

inline float ScoreScale(int head_width) { return 1 / std::sqrt(static_cast<float>(head_width)); }

// Where piece `piece` of row `row` lies in a tile.
template <int kWidth>
__device__ __forceinline__ uint32_t TileElement(uint32_t row, uint32_t piece) {
  return row * kWidth + (piece ^ (row & 7)) * kPieceElements;
}

// Begins copying rows first_row ... first_row + kTileRows - 1 to `tile`; by all threads.
template <int kWidth>
__device__ __forceinline__ void CopyTile(const HeadRows<const BFloat16Bits>& rows, int first_row,
                                         BFloat16Bits* tile) {
  constexpr uint32_t kPieces = kWidth / kPieceElements;
  constexpr uint32_t kStepRows = kThreads / kPieces;  // A multiple of 8: steps are swizzled alike.
  const uint32_t row = threadIdx.x / kPieces;
  const uint32_t piece = threadIdx.x % kPieces;
  const uint32_t element = TileElement<kWidth>(row, piece);
  const int64_t lane_row = first_row + static_cast<int>(row);
  const BFloat16Bits* from = rows.data + lane_row * rows.stride + piece * kPieceElements;
#pragma unroll
  for (uint32_t step = 0; step < kTileRows / kStepRows; ++step) {
    const bool present = lane_row + step * kStepRows < rows.count;
    CopyAsync<16>(tile, (element + step * kStepRows * kWidth) * sizeof(BFloat16Bits),
                  present ? from : rows.data, present);
    from += kStepRows * rows.stride;
  }
}

// Tiles of the rows of two tensors in shared memory (TilesBytes), two of each: while one stage, 0
// or 1, is worked on, the other is on its way.
template <int kWidth>
struct TilePairs {
  HeadRows<const BFloat16Bits> a_rows;
  HeadRows<const BFloat16Bits> b_rows;
  BFloat16Bits* shared = nullptr;

  __device__ __forceinline__ BFloat16Bits* A(int stage) const {
    return shared + stage * Sizes<kWidth>::kTileElements;
  }
  __device__ __forceinline__ BFloat16Bits* B(int stage) const { return A(2 + stage); }
  __device__ __forceinline__ BFloat16Bits* End() const { return A(4); }

  // Begins copying the rows from first_row on, in one group with the thread's copies before it.
  __device__ __forceinline__ void Copy(int first_row, int stage) const {
    CopyTile<kWidth>(a_rows, first_row, A(stage));
    CopyTile<kWidth>(b_rows, first_row, B(stage));
    CommitCopies();
  }
};

// Operands of products with a tile: 16 rows from `row` on, 16 columns from `column` on; `row` is a
// multiple of 8.
struct FragmentPair {
  FragmentB b[2];
};

// Sums over columns: b[i] has rows row + 8 i ... row + 8 i + 7 as its columns.
template <int kWidth>
__device__ __forceinline__ FragmentPair RowsAsColumns(const BFloat16Bits* tile, int row,
                                                      int column) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t lane_row = lane % 8 + lane / 16 * 8;
  const uint32_t piece = column / kPieceElements + lane / 8 % 2;
  const Matrices m = LoadMatrices(tile, TileElement<kWidth>(lane_row, piece) + row * kWidth);
  return {{{{m.x[0], m.x[1]}}, {{m.x[2], m.x[3]}}}};
}

// Sums over rows: b[i] has columns column + 8 i ... column + 8 i + 7.
template <int kWidth>
__device__ __forceinline__ FragmentPair RowsAsRows(const BFloat16Bits* tile, int row, int column) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t piece = column / kPieceElements + lane / 16;
  const Matrices m =
      LoadMatricesTransposed(tile, TileElement<kWidth>(lane % 16, piece) + row * kWidth);
  return {{{{m.x[0], m.x[1]}}, {{m.x[2], m.x[3]}}}};
}

// The rows that a warp owns, from first_row on, as left operands; a depth step has 16 columns.
template <int kWidth>
struct OwnedRows {
  FragmentA a[Sizes<kWidth>::kRowTiles][Sizes<kWidth>::kDepthSteps];
};

// Where a lane's elements of an owned row tile are: in rows g and g + 8 of it.
__device__ __forceinline__ int LaneRow(int first_row, int row_tile, int half) {
  return first_row + row_tile * 16 + half * 8 + static_cast<int>(threadIdx.x % 32 / 4);
}
// The first of the two neighbouring columns that a lane has of eight.
__device__ __forceinline__ int LaneColumn() { return static_cast<int>(threadIdx.x % 4 * 2); }

template <int kWidth>
__device__ __forceinline__ OwnedRows<kWidth> LoadOwnedRows(const HeadRows<const BFloat16Bits>& rows,
                                                           int first_row) {
  OwnedRows<kWidth> owned;
#pragma unroll
  for (int tile = 0; tile < Sizes<kWidth>::kRowTiles; ++tile) {
#pragma unroll
    for (int step = 0; step < Sizes<kWidth>::kDepthSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // As FragmentA numbers them.
        const int row = LaneRow(first_row, tile, i % 2);
        const BFloat16Bits* from =
            rows.data + row * rows.stride + step * 16 + i / 2 * 8 + LaneColumn();
        owned.a[tile][step].x[i] =
            row < rows.count ? *reinterpret_cast<const uint32_t*>(from) : uint32_t{0};
      }
    }
  }
  return owned;
}

// Over the four lanes that share rows.
__device__ __forceinline__ float SumOfRow(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A warp's rows, of 16 columns that stand for as many rows of a tile.
template <int kWidth>
struct Part {
  Accumulator x[Sizes<kWidth>::kRowTiles][2] = {};
};

// Each owned row times each of the tile's 16 rows from `row` on.
template <int kWidth>
__device__ __forceinline__ Part<kWidth> Products(const OwnedRows<kWidth>& owned,
                                                 const BFloat16Bits* tile, int row) {
  Part<kWidth> products;
#pragma unroll
  for (int step = 0; step < Sizes<kWidth>::kDepthSteps; ++step) {
    const FragmentPair columns = RowsAsColumns<kWidth>(tile, row, step * 16);
#pragma unroll
    for (int row_tile = 0; row_tile < Sizes<kWidth>::kRowTiles; ++row_tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        MultiplyAdd(owned.a[row_tile][step], columns.b[i], products.x[row_tile][i]);
      }
    }
  }
  return products;
}

// Scores of keys after the query become -infinity. That goes for keys past the context too: they
// follow every query of the sequence.
enum class RowsAre { kQueries, kKeys };
template <RowsAre kRowsAre, int kWidth>
__device__ __forceinline__ void MaskLaterKeys(int first_row, int first_column,
                                              Part<kWidth>& scores) {
#pragma unroll
  for (int tile = 0; tile < Sizes<kWidth>::kRowTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = LaneRow(first_row, tile, i / 2 % 2);
      const int column = first_column + i / 4 * 8 + LaneColumn() + i % 2;
      if (kRowsAre == RowsAre::kQueries ? column > row : row > column) {
        scores.x[tile][i / 4].x[i % 4] = -INFINITY;
      }
    }
  }
}

// Sums of a warp's rows, kWidth columns each.
template <int kWidth>
struct OwnedSums {
  Accumulator x[Sizes<kWidth>::kRowTiles][Sizes<kWidth>::kColumnTiles] = {};
};

// sums += weights, rounded, times the tile's 16 rows from `row` on.
template <int kWidth>
__device__ __forceinline__ void AddWeightedRows(const Part<kWidth>& weights,
                                                const BFloat16Bits* tile, int row,
                                                OwnedSums<kWidth>& sums) {
  FragmentA rounded[Sizes<kWidth>::kRowTiles];
#pragma unroll
  for (int row_tile = 0; row_tile < Sizes<kWidth>::kRowTiles; ++row_tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = weights.x[row_tile][i / 2].x + i % 2 * 2;
      rounded[row_tile].x[i] = PackBFloat16(x[0], x[1]);
    }
  }
#pragma unroll
  for (int column = 0; column < kWidth; column += 16) {
    const FragmentPair rows = RowsAsRows<kWidth>(tile, row, column);
#pragma unroll
    for (int row_tile = 0; row_tile < Sizes<kWidth>::kRowTiles; ++row_tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        MultiplyAdd(rounded[row_tile], rows.b[i], sums.x[row_tile][column / 8 + i]);
      }
    }
  }
}

// One value a row that a lane has elements of: x[t][h] is of row LaneRow(first_row, t, h).
template <int kWidth>
struct PerRow {
  float x[Sizes<kWidth>::kRowTiles][2];
};
template <int kWidth>
__device__ __forceinline__ PerRow<kWidth> AllRows(float value) {
  PerRow<kWidth> rows;
#pragma unroll
  for (int i = 0; i < 2 * Sizes<kWidth>::kRowTiles; ++i) rows.x[i / 2][i % 2] = value;
  return rows;
}

// Stores the sums of rows that are there, each times its factor, rounded.
template <int kWidth>
__device__ __forceinline__ void StoreOwnedRows(const OwnedSums<kWidth>& sums,
                                               const PerRow<kWidth>& factor,
                                               const HeadRows<BFloat16Bits>& rows, int first_row) {
#pragma unroll
  for (int tile = 0; tile < Sizes<kWidth>::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = LaneRow(first_row, tile, half);
      if (row >= rows.count) continue;
      BFloat16Bits* to = rows.data + row * rows.stride + LaneColumn();
#pragma unroll
      for (int column = 0; column < Sizes<kWidth>::kColumnTiles; ++column) {
        const float* x = sums.x[tile][column].x + 2 * half;
        *reinterpret_cast<uint32_t*>(to + column * 8) =
            PackBFloat16(x[0] * factor.x[tile][half], x[1] * factor.x[tile][half]);
      }
    }
  }
}

}  // namespace ballast::worker::cuda::attention

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_TILES_CUH_
