#include "gpu_worker/cuda/launch.cuh"
#include "gpu_worker/cuda/mma.cuh"
#include "tests/gpu_worker/cuda/mma_test_kernels.h"

namespace ballast::worker::cuda {
namespace {

__device__ uint32_t Pair(BFloat16Bits low, BFloat16Bits high) {
  return low | static_cast<uint32_t>(high) << 16;
}

__global__ void MultiplyTileKernel(const BFloat16Bits* a, const BFloat16Bits* b, float* sum) {
  const int g = static_cast<int>(threadIdx.x) / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const auto a_pair = [&](int row, int column) {
    return Pair(a[row * 16 + column], a[row * 16 + column + 1]);
  };
  const auto b_pair = [&](int row, int column) {
    return Pair(b[row * 8 + column], b[(row + 1) * 8 + column]);
  };
  const FragmentA left = {
      {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8), a_pair(g + 8, 2 * t + 8)}};
  const FragmentB right = {{b_pair(2 * t, g), b_pair(2 * t + 8, g)}};
  float* const upper = sum + g * 8 + 2 * t;
  float* const lower = upper + 8 * 8;
  Accumulator x = {{upper[0], upper[1], lower[0], lower[1]}};
  MultiplyAdd(left, right, x);
  upper[0] = x.x[0];
  upper[1] = x.x[1];
  lower[0] = x.x[2];
  lower[1] = x.x[3];
}

// Where row r of matrix i is put in shared memory: 5 is prime to 32.
__device__ uint32_t ShuffledRow(uint32_t index) { return index * 5 % 32; }

__global__ void LoadTilesKernel(const BFloat16Bits* matrices, bool transposed,
                                uint32_t* registers) {
  __shared__ __align__(16) BFloat16Bits tile[32 * 8];
  const uint32_t lane = threadIdx.x;
  for (uint32_t column = 0; column < 8; ++column) {
    tile[ShuffledRow(lane) * 8 + column] = matrices[lane * 8 + column];
  }
  __syncthreads();
  const uint32_t element = ShuffledRow(lane) * 8;
  const Matrices loaded =
      transposed ? LoadMatricesTransposed(tile, element) : LoadMatrices(tile, element);
  for (uint32_t i = 0; i < 4; ++i) registers[lane * 4 + i] = loaded.x[i];
}

__device__ void WriteOut(const std::byte* shared, std::byte* to) {
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kCopiedBytes; i += 32) to[i] = shared[i];
  __syncthreads();
}

__global__ void CopyThroughSharedKernel(const std::byte* from, uint32_t present, std::byte* first,
                                        std::byte* both) {
  __shared__ __align__(16) std::byte shared[kCopiedBytes];
  const uint32_t lane = threadIdx.x;
  for (uint32_t i = lane; i < kCopiedBytes; i += 32) shared[i] = std::byte{0x55};
  __syncthreads();
  CopyAsync<16>(shared, 16 * lane, from + 16 * lane, (present >> lane & 1) != 0);
  CommitCopies();
  WaitForCopies<0>();
  WriteOut(shared, first);
  CopyAsync<4>(shared + 32 * 16, 4 * lane, from + 32 * 16 + 4 * lane, true);
  CommitCopies();
  CommitCopies();  // An empty group.
  WaitForCopies<1>();
  WriteOut(shared, both);
}

__global__ void PackAndExp2Kernel(int count, const float* low, const float* high, uint32_t* packed,
                                  float* power) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) {
    packed[i] = PackBFloat16(low[i], high[i]);
    power[i] = FastExp2(low[i]);
  }
}

const Grid kOneWarp = {.blocks = dim3(1, 1, 1), .threads = 32, .shared_bytes = 0};

}  // namespace

absl::Status MultiplyTile(DeviceStream& stream, const BFloat16Bits* a, const BFloat16Bits* b,
                          float* sum) {
  return Launch(stream, "MultiplyTile", kOneWarp, &MultiplyTileKernel, a, b, sum);
}

absl::Status LoadTiles(DeviceStream& stream, const BFloat16Bits* matrices, bool transposed,
                       uint32_t* registers) {
  return Launch(stream, "LoadTiles", kOneWarp, &LoadTilesKernel, matrices, transposed, registers);
}

absl::Status CopyThroughShared(DeviceStream& stream, const std::byte* from, uint32_t present,
                               std::byte* first, std::byte* both) {
  return Launch(stream, "CopyThroughShared", kOneWarp, &CopyThroughSharedKernel, from, present,
                first, both);
}

absl::Status PackAndExp2(DeviceStream& stream, int count, const float* low, const float* high,
                         uint32_t* packed, float* power) {
  return Launch(stream, "PackAndExp2", kOneWarp, &PackAndExp2Kernel, count, low, high, packed,
                power);
}

}  // namespace ballast::worker::cuda
