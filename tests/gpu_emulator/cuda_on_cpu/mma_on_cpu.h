// In place of mma.cuh when a kernel file is compiled for the CPU: the same calls, by the register
// layouts that are written there. Included after cuda_on_cpu.h and before all else.
//
// A copy is done when its thread waits for it, and what it overwrites is poisoned when it is begun:
// so a missing wait shows as wrong values, and so does a copy to where others still read.
#ifndef BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_MMA_ON_CPU_H_
#define BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_MMA_ON_CPU_H_

// The include guard of mma.cuh.
#define BALLAST_GPU_WORKER_CUDA_MMA_CUH_

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>

#include "cpu_optimizer_service/common/float_format.h"
#include "tests/gpu_emulator/cuda_on_cpu/block_run.h"

namespace ballast::worker::cuda {

struct FragmentA {
  uint32_t x[4];
};
struct FragmentB {
  uint32_t x[2];
};
struct Accumulator {
  float x[4];
};
struct Matrices {
  uint32_t x[4];
};

// Half `half` of a register.
inline float HalfOf(uint32_t packed, int half) {
  return BFloat16ToFloat(static_cast<uint16_t>(packed >> (16 * half)));
}

struct MultiplyAddOfLane {
  FragmentA a;
  FragmentB b;
  Accumulator sum;

  static void Exchange(const WarpArguments& arguments) {
    float a[16][16];
    float b[16][8];
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      const auto& from = *static_cast<const MultiplyAddOfLane*>(arguments[lane]);
      const int g = lane / 4;
      const int t = lane % 4;
      for (int i = 0; i < 8; ++i) {
        const int half = i % 2;
        a[g + i / 2 % 2 * 8][2 * t + i / 4 * 8 + half] = HalfOf(from.a.x[i / 2], half);
        if (i < 4) b[2 * t + i / 2 * 8 + half][g] = HalfOf(from.b.x[i / 2], half);
      }
    }
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      auto& to = *static_cast<MultiplyAddOfLane*>(arguments[lane]);
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8;
        const int column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) to.sum.x[i] += a[row][k] * b[k][column];
      }
    }
  }
};

inline void MultiplyAdd(const FragmentA& a, const FragmentB& b, Accumulator& sum) {
  MultiplyAddOfLane lane{a, b, sum};
  MeetInWarp("MultiplyAdd", &MultiplyAddOfLane::Exchange, &lane);
  sum = lane.sum;
}

struct LoadMatricesOfLane {
  const uint16_t* row;
  Matrices result;

  // Element [r][c] of matrix i.
  static uint32_t Element(const WarpArguments& arguments, int i, int r, int c) {
    return static_cast<const LoadMatricesOfLane*>(arguments[8 * i + r])->row[c];
  }

  template <bool kTransposed>
  static void Exchange(const WarpArguments& arguments) {
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      const int g = lane / 4;
      const int t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const auto element = [&](int r, int c) {
          return kTransposed ? Element(arguments, i, c, r) : Element(arguments, i, r, c);
        };
        static_cast<LoadMatricesOfLane*>(arguments[lane])->result.x[i] =
            element(g, 2 * t) | element(g, 2 * t + 1) << 16;
      }
    }
  }
};

inline bool Aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

inline Matrices LoadMatricesAs(const char* what, WarpExchange exchange, const uint16_t* row) {
  if (!Aligned(row, 16)) FailKernel("loads a matrix whose row is not 16-byte aligned");
  LoadMatricesOfLane lane{row, {}};
  MeetInWarp(what, exchange, &lane);
  return lane.result;
}

inline Matrices LoadMatrices(const uint16_t* tile, uint32_t element) {
  return LoadMatricesAs("LoadMatrices", &LoadMatricesOfLane::Exchange<false>, tile + element);
}
inline Matrices LoadMatricesTransposed(const uint16_t* tile, uint32_t element) {
  return LoadMatricesAs("LoadMatricesTransposed", &LoadMatricesOfLane::Exchange<true>,
                        tile + element);
}

// Copies of the threads of the block that runs.
class AsyncCopies {
 public:
  void Begin(void* to, const void* from, size_t bytes) {
    Mine().push_back({to, from, bytes, groups_[current.thread.x], current.block});
    std::memset(to, 0xff, bytes);
  }
  void Commit() { ++groups_[current.thread.x]; }
  void Wait(uint64_t pending) {
    std::deque<Copy>& mine = Mine();
    while (!mine.empty() && mine.front().group + pending < groups_[current.thread.x]) {
      const Copy& copy = mine.front();
      if (copy.from == nullptr) {
        std::memset(copy.to, 0, copy.bytes);
      } else {
        std::memcpy(copy.to, copy.from, copy.bytes);
      }
      mine.pop_front();
    }
  }

 private:
  struct Copy {
    void* to;
    const void* from;  // nullptr: zeros.
    size_t bytes;
    uint64_t group;
    uint3 block;
  };

  std::deque<Copy>& Mine() {
    std::deque<Copy>& mine = copies_[current.thread.x];
    if (!mine.empty()) {
      const uint3& block = mine.front().block;
      if (block.x != current.block.x || block.y != current.block.y || block.z != current.block.z) {
        FailKernel("finds copies that this thread of another block has not waited for");
      }
    }
    return mine;
  }

  std::array<std::deque<Copy>, kMaxBlockThreads> copies_;
  std::array<uint64_t, kMaxBlockThreads> groups_ = {};  // Committed.
};
inline AsyncCopies async_copies;

template <int kBytes>
void CopyAsync(void* to, uint32_t offset_bytes, const void* from, bool present) {
  static_assert(kBytes == 4 || kBytes == 16);
  std::byte* const begin = static_cast<std::byte*>(to) + offset_bytes;
  if (!Aligned(begin, kBytes) || !Aligned(from, kBytes)) FailKernel("copies what is not aligned");
  async_copies.Begin(begin, present ? from : nullptr, kBytes);
}
inline void CommitCopies() { async_copies.Commit(); }
template <int kPending>
void WaitForCopies() {
  async_copies.Wait(kPending);
}

inline uint32_t PackBFloat16(float low, float high) {
  return FloatToBFloat16(low) | static_cast<uint32_t>(FloatToBFloat16(high)) << 16;
}

inline float FastExp2(float x) {
  const float result = std::exp2(x);
  return std::fpclassify(result) == FP_SUBNORMAL ? 0 : result;
}

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_MMA_ON_CPU_H_
