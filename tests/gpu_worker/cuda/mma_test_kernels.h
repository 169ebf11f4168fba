// Kernels of one warp, each of which shows one call of mma.cuh. Tiles are row-major.
#ifndef BALLAST_TESTS_GPU_WORKER_CUDA_MMA_TEST_KERNELS_H_
#define BALLAST_TESTS_GPU_WORKER_CUDA_MMA_TEST_KERNELS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

// MultiplyAdd: sum += a * b, of 16 x 16 and 16 x 8, put into registers and taken out of them by the
// layouts that mma.cuh writes down.
absl::Status MultiplyTile(DeviceStream& stream, const BFloat16Bits* a, const BFloat16Bits* b,
                          float* sum);

// LoadMatrices, of four 8 x 8 matrices one after another. registers[4 * lane + i] is x[i] of the
// lane. The matrices are in shared memory in another order, each row at a place of its own.
absl::Status LoadTiles(DeviceStream& stream, const BFloat16Bits* matrices, bool transposed,
                       uint32_t* registers);

// CopyAsync of each lane's 16 bytes, if the lane's bit of `present` is set, and of its 4 bytes, in
// two groups. `first` is what is there once the first group has arrived, `both` once both have.
inline constexpr int kCopiedBytes = 32 * (16 + 4);
absl::Status CopyThroughShared(DeviceStream& stream, const std::byte* from, uint32_t present,
                               std::byte* first, std::byte* both);

// packed[i] = PackBFloat16(low[i], high[i]);  power[i] = FastExp2(low[i]).
absl::Status PackAndExp2(DeviceStream& stream, int count, const float* low, const float* high,
                         uint32_t* packed, float* power);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_WORKER_CUDA_MMA_TEST_KERNELS_H_
