// Which rows of which head a block of attention's kernels works at, and where they lie.
//
// A block of four warps owns rows (queries or keys) of one head, which its warps keep in registers,
// and goes through the head's other rows in tiles of kTileRows, two of them in shared memory: while
// one is worked on, the next is on its way. Rows past the end of the context are zeros when loaded,
// and never stored.
#ifndef BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_ROWS_CUH_
#define BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_ROWS_CUH_

#include <cstddef>
#include <cstdint>

#include "gpu_worker/cuda/kernels/attention.h"
#include "gpu_worker/cuda/launch.cuh"

namespace ballast::worker::cuda::attention {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kTileRows = 64;

// What follows from the head width. Wide heads leave registers for half as many rows.
template <int kWidth>
struct Sizes {
  static_assert(kWidth == 64 || kWidth == 128);
  static constexpr int kRowTiles = 128 / kWidth;  // Tiles of 16 rows that a warp owns.
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kBlockRows = kWarps * kWarpRows;  // A multiple of kTileRows.
  static constexpr int kDepthSteps = kWidth / 16;        // In a product that sums over the width.
  static constexpr int kColumnTiles = kWidth / 8;
  static constexpr int kTileElements = kTileRows * kWidth;
};

// Which head of which sequence the block works at, and the first of its rows.
struct BlockOfHead {
  int sequence = 0;
  int head = 0;
  int64_t index = 0;  // The head's, among all heads of all sequences.
  int first_row = 0;
};

// One block after another along x: there may be more of them than y has room for.
inline dim3 GridOfHeads(const AttentionShape& shape, int block_rows) {
  const int64_t blocks = (int64_t{shape.context} + block_rows - 1) / block_rows;
  return dim3(static_cast<unsigned>(blocks * shape.sequences * shape.heads), 1, 1);
}

// Blocks begin in about the order of their number, so the longest work has the first of a head's.
enum class LongestWork { kFirstRows, kLastRows };

__device__ __forceinline__ BlockOfHead FindBlock(const AttentionShape& shape, int block_rows,
                                                 LongestWork longest) {
  const int blocks = (shape.context + block_rows - 1) / block_rows;
  const int index = static_cast<int>(blockIdx.x) / blocks;
  const int block = static_cast<int>(blockIdx.x) % blocks;
  return {
      .sequence = index / shape.heads,
      .head = index % shape.heads,
      .index = index,
      .first_row = (longest == LongestWork::kFirstRows ? block : blocks - 1 - block) * block_rows};
}

// The first of the rows that the calling warp owns.
template <int kWidth>
__device__ __forceinline__ int FirstOwnedRow(const BlockOfHead& block) {
  return block.first_row + static_cast<int>(threadIdx.x / 32) * Sizes<kWidth>::kWarpRows;
}

// Where the keys end that a block of queries needs.
template <int kWidth>
__device__ __forceinline__ int KeysEnd(const AttentionShape& shape, const BlockOfHead& block) {
  const int end = block.first_row + Sizes<kWidth>::kBlockRows;
  return end < shape.context ? end : shape.context;
}

// Bytes of shared memory: two tiles of each of two tensors.
template <int kWidth>
size_t TilesBytes() {
  return 4 * Sizes<kWidth>::kTileElements * sizeof(BFloat16Bits);
}

// The rows of one head in a tensor: row r begins at data + r * stride.
template <typename T>
struct HeadRows {
  T* data = nullptr;
  int64_t stride = 0;
  int count = 0;
};

// `part`: 0 q, 1 k, 2 v.
template <typename T>
__device__ __forceinline__ HeadRows<T> RowsOfQkv(const AttentionShape& shape,
                                                 const BlockOfHead& block, T* qkv, int part) {
  const int64_t stride = int64_t{3} * shape.width;
  return {qkv + int64_t{block.sequence} * shape.context * stride + int64_t{part} * shape.width +
              int64_t{block.head} * (shape.width / shape.heads),
          stride, shape.context};
}

template <typename T>
__device__ __forceinline__ HeadRows<T> RowsOfOut(const AttentionShape& shape,
                                                 const BlockOfHead& block, T* out) {
  return {out + int64_t{block.sequence} * shape.context * shape.width +
              int64_t{block.head} * (shape.width / shape.heads),
          shape.width, shape.context};
}

}  // namespace ballast::worker::cuda::attention

#endif  // BALLAST_GPU_WORKER_CUDA_KERNELS_ATTENTION_ROWS_CUH_
