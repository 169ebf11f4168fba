// Runs the threads of a kernel on the CPU, each as a fiber: the blocks of a grid one after another,
// the threads of a block in an order that a seed chooses again after each barrier, so that a missing
// barrier shows as wrong values. The names that kernels use are in cuda_on_cpu.h.
//
// Ends the process, saying where, at what a GPU would leave undefined: threads of a block or lanes
// of a warp that wait for different things, or for one that has returned.
//
// Threads: kernels of several OS threads run one at a time.
#ifndef BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_BLOCK_RUN_H_
#define BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_BLOCK_RUN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/strings/string_view.h"

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

namespace ballast::worker::cuda {

inline constexpr int kWarpThreads = 32;
inline constexpr unsigned kMaxBlockThreads = 1024;
inline constexpr size_t kMaxSharedBytes = 227 * 1024;  // As compute capability 9.0 has.
inline constexpr unsigned kMaxGridX = 2147483647;
inline constexpr unsigned kMaxGridYZ = 65535;

struct BlockGrid {
  dim3 blocks;
  unsigned threads = 1;
  size_t shared_bytes = 0;
};

// Runs `thread` once for each thread of each block. `name` is for errors.
void RunBlocks(absl::string_view name, const BlockGrid& grid, const std::function<void()>& thread);

// The orders of all later kernels follow from it. From the beginning, it is 0.
void SetThreadOrder(uint64_t seed);

// What the thread of a kernel that runs now is, and has.
struct CurrentThread {
  uint3 thread = {0, 0, 0};
  uint3 block = {0, 0, 0};
  dim3 threads;
  dim3 blocks;
  std::byte* dynamic_shared = nullptr;
};
inline constinit CurrentThread current;

// Returns when all threads of the block have reached it.
void MeetInBlock(const char* what);

// What the lanes of a warp do together: each brings an argument, and the last to come computes for
// all. Lanes that the warp does not have are nullptr.
using WarpArguments = std::array<void*, kWarpThreads>;
using WarpExchange = void (*)(const WarpArguments& arguments);

// Returns once `exchange` has run, which is nullable: then lanes only meet.
void MeetInWarp(const char* what, WarpExchange exchange, void* argument);

// Ends the process with `problem`, the kernel, the block and the thread.
[[noreturn]] void FailKernel(absl::string_view problem);

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_BLOCK_RUN_H_
