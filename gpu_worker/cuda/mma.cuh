// What kernels need of PTX for tensor cores: products of bf16 tiles by a warp (sm_80 and newer),
// their loads from shared memory, and copies into it that the warp does not wait for.
//
// All calls but the copies are done by the 32 lanes of a warp together. With g = lane / 4 and
// t = lane % 4, a lane holds (PTX ISA, "Matrix Fragments for mma.m16n8k16" of .bf16; low half
// first):
//
//   FragmentA, 16 x 16:   x[0]: [g][2t, 2t+1]       x[1]: [g+8][2t, 2t+1]
//                         x[2]: [g][2t+8, 2t+9]     x[3]: [g+8][2t+8, 2t+9]
//   FragmentB, 16 x 8:    x[0]: [2t, 2t+1][g]       x[1]: [2t+8, 2t+9][g]
//   Accumulator, 16 x 8:  x[0], x[1]: [g][2t], [g][2t+1]
//                         x[2], x[3]: [g+8][2t], [g+8][2t+1]
//
// So the accumulators of columns n and n + 8, rounded, are the FragmentA of these 16 columns.
//
// The tests have the same calls on the CPU (tests/gpu_emulator/cuda_on_cpu/mma_on_cpu.h), which
// replace these by the include guard.
#ifndef BALLAST_GPU_WORKER_CUDA_MMA_CUH_
#define BALLAST_GPU_WORKER_CUDA_MMA_CUH_

#include <cuda_runtime.h>

#include <cstdint>

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

// sum += a * b; fp32 sums in an order of the hardware's own, the same every time.
__device__ __forceinline__ void MultiplyAdd(const FragmentA& a, const FragmentB& b,
                                            Accumulator& sum) {
  // volatile, though it has no effect but its result: the lanes must do it together, so it may not
  // be moved to a branch that only some of them take.
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum.x[0]), "+f"(sum.x[1]), "+f"(sum.x[2]), "+f"(sum.x[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Four 8 x 8 matrices of 16-bit elements in shared memory: lane 8 i + r has the address of row r of
// matrix i begins, at tile[element], 16-byte aligned, and gets elements [g][2t, 2t+1] of matrix i
// in x[i]. (An address in two parts, so that the constants of unrolled loops go into the
// instruction.)
struct Matrices {
  uint32_t x[4];
};
__device__ __forceinline__ Matrices LoadMatrices(const uint16_t* tile, uint32_t element) {
  const uint32_t address = SharedAddress(tile) + 2 * element;
  Matrices result;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x[0]), "=r"(result.x[1]), "=r"(result.x[2]), "=r"(result.x[3])
               : "r"(address)
               : "memory");
  return result;
}

// The same, of the transposed matrices: x[i] has [2t, 2t+1][g] of what lies in memory.
__device__ __forceinline__ Matrices LoadMatricesTransposed(const uint16_t* tile, uint32_t element) {
  const uint32_t address = SharedAddress(tile) + 2 * element;
  Matrices result;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x[0]), "=r"(result.x[1]), "=r"(result.x[2]), "=r"(result.x[3])
               : "r"(address)
               : "memory");
  return result;
}

// Copies kBytes (4 or 16; both addresses so aligned) from global memory to offset_bytes after `to`
// in shared memory, or writes zeros if `present` is false: then `from` is not read. It is done once
// this thread has waited for it, and seen by others after a __syncthreads that follows; until then
// what is in `to` is undefined. A thread waits for all its copies before it returns.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(void* to, uint32_t offset_bytes, const void* from,
                                          bool present) {
  static_assert(kBytes == 4 || kBytes == 16);
  const uint32_t address = SharedAddress(to) + offset_bytes;
  const int source_bytes = present ? kBytes : 0;
  if constexpr (kBytes == 16) {  // Past the L1 cache: nothing is read twice.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
                 "r"(source_bytes)
                 : "memory");
  }
}

// Ends a group: this thread's copies since the last one.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread but the last kPending.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Both rounded to bf16, to nearest even; `low` in the low half.
__device__ __forceinline__ uint32_t PackBFloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x with a relative error of at most 2^-22; denormal results are zero.
__device__ __forceinline__ float FastExp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace ballast::worker::cuda

#endif  // BALLAST_GPU_WORKER_CUDA_MMA_CUH_
