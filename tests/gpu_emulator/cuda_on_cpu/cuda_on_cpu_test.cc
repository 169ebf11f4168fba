// What tests of kernels rely on: that threads run as on a GPU, and that mistakes show.
#include "tests/gpu_emulator/cuda_on_cpu/cuda_on_cpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "tests/gpu_emulator/cuda_on_cpu/block_run.h"

namespace ballast::worker::cuda {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsNan;
using testing::SizeIs;

TEST(BlockRun, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> runs(3 * 2 * 5 * 70);
  RunBlocks("count", {.blocks = dim3(3, 2, 5), .threads = 70}, [&] {
    EXPECT_EQ(blockDim.x, 70u);
    EXPECT_EQ(gridDim.y, 2u);
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    ++runs[block * blockDim.x + threadIdx.x];
  });
  EXPECT_THAT(runs, Each(1));
}

TEST(BlockRun, ThreadsKeepTheirIndexAndTheirVariablesAcrossBarriers) {
  std::vector<unsigned> before(256), after(256);
  RunBlocks("keep", {.threads = 256}, [&] {
    const unsigned thread = threadIdx.x;
    before[thread] = thread;
    for (int i = 0; i < 3; ++i) {
      __syncthreads();
      __syncwarp();
    }
    after[thread] = threadIdx.x;
  });
  EXPECT_EQ(after, before);
}

// Each thread adds what its neighbour wrote before the barrier.
void ReverseThroughShared(bool with_barrier, std::vector<float>& out) {
  RunBlocks("reverse", {.threads = 64, .shared_bytes = 64 * sizeof(float)}, [&] {
    float* shared = DynamicShared<float>();
    shared[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (with_barrier) __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x];
  });
}

TEST(BlockRun, ABarrierLetsThreadsSeeEachOthersValues) {
  std::vector<float> out(64);
  ReverseThroughShared(true, out);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(out[i], 63 - i);
}

TEST(BlockRun, AMissingBarrierShowsAsPoison) {
  std::vector<float> out(64);
  ReverseThroughShared(false, out);
  EXPECT_THAT(out, testing::Contains(IsNan()));
}

TEST(BlockRun, StaticSharedMemoryIsPoisonedBeforeEachBlock) {
  int poisoned = 0;
  RunBlocks("poison", {.blocks = dim3(4), .threads = 1}, [&] {
    __shared__ float value;
    poisoned += std::isnan(value);
    value = 1;
  });
  EXPECT_EQ(poisoned, 4);
}

std::vector<unsigned> OrderOfThreads(uint64_t seed) {
  SetThreadOrder(seed);
  std::vector<unsigned> order;
  RunBlocks("order", {.threads = 40}, [&] {
    __syncthreads();
    order.push_back(threadIdx.x);
  });
  return order;
}

TEST(BlockRun, TheSeedChoosesTheOrderOfThreads) {
  const std::vector<unsigned> first = OrderOfThreads(1);
  EXPECT_EQ(OrderOfThreads(1), first);
  EXPECT_NE(OrderOfThreads(2), first);
  EXPECT_THAT(std::set<unsigned>(first.begin(), first.end()), SizeIs(40));
}

TEST(BlockRun, KernelsOfTwoThreadsDoNotMeet) {
  // Both use the same static array.
  const auto run = [](float value, bool& same) {
    for (int i = 0; i < 50; ++i) {
      RunBlocks("two", {.threads = 32}, [&] {
        __shared__ float shared[32];
        shared[threadIdx.x] = value;
        __syncthreads();
        same = same && shared[31 - threadIdx.x] == value;
      });
    }
  };
  bool first_same = true, second_same = true;
  std::thread other([&] { run(1, first_same); });
  run(2, second_same);
  other.join();
  EXPECT_TRUE(first_same);
  EXPECT_TRUE(second_same);
}

TEST(Shuffle, GivesTheValueOfTheOtherLane) {
  std::vector<int> broadcast(64), with(64), down(64);
  std::vector<double> of_eight(64);
  RunBlocks("shuffle", {.threads = 64}, [&] {
    const int thread = static_cast<int>(threadIdx.x);
    broadcast[thread] = __shfl_sync(0xffffffffu, thread, 5);
    with[thread] = __shfl_xor_sync(0xffffffffu, thread, 3);
    down[thread] = __shfl_down_sync(0xffffffffu, thread, 4u);
    of_eight[thread] = __shfl_sync(0xffffffffu, thread + 0.5, 1, 8);
  });
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(broadcast[i], i / 32 * 32 + 5);
    EXPECT_EQ(with[i], i ^ 3);
    EXPECT_EQ(down[i], i % 32 < 28 ? i + 4 : i);
    EXPECT_EQ(of_eight[i], i / 8 * 8 + 1.5);
  }
}

TEST(Shuffle, AWarpMayBeIncomplete) {
  std::vector<int> sums(40);
  RunBlocks("incomplete", {.threads = 40}, [&] {
    int sum = 1;
    const int lanes = threadIdx.x < 32 ? 32 : 8;
    for (int with = lanes / 2; with > 0; with /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, with);
    }
    sums[threadIdx.x] = sum;
  });
  EXPECT_EQ(sums[31], 32);
  EXPECT_EQ(sums[39], 8);
}

TEST(Atomics, AddAndCompareIntegers) {
  unsigned long long sum = 0, least = 1000;
  RunBlocks("atomics", {.blocks = dim3(3), .threads = 100}, [&] {
    atomicAdd(&sum, 2ull);
    atomicMin(&least, 7ull + threadIdx.x);
  });
  EXPECT_EQ(sum, 600u);
  EXPECT_EQ(least, 7u);
}

void AddKernel(int count, float value, float* to) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index < count) to[index] += value;
}

class Launching : public testing::Test {
 protected:
  FakeDevice device_;
  std::unique_ptr<DeviceStream> stream_ = device_.CreateStream("compute").value();
};

TEST_F(Launching, GivesTheKernelToTheStreamWithItsArguments) {
  const auto memory = device_.Allocate(100 * sizeof(float), "a test").value();
  std::vector<float> out(100, -1);
  int count = 100;
  ASSERT_TRUE(Launch(*stream_, "add", {.blocks = dim3(4), .threads = 32}, &AddKernel, count, 2.5f,
                     memory->as<float>())
                  .ok());
  count = 0;  // The kernel has its own.
  ASSERT_TRUE(stream_
                  ->CopyToHost(absl::MakeSpan(reinterpret_cast<std::byte*>(out.data()), 400),
                               memory->data())
                  .ok());
  ASSERT_TRUE(stream_->Synchronize().ok());
  EXPECT_THAT(out, Each(2.5f));
}

TEST_F(Launching, AnEmptyGridIsNoWork) {
  EXPECT_TRUE(Launch(*stream_, "none", {.blocks = dim3(0)}, &AddKernel, 1, 1.0f,
                     static_cast<float*>(nullptr))
                  .ok());
  EXPECT_TRUE(stream_->Synchronize().ok());
}

TEST_F(Launching, WhatNoGpuCanRunIsRefused) {
  for (const Grid& grid : {Grid{.threads = 1025}, Grid{.blocks = dim3(1, 65536)},
                           Grid{.shared_bytes = kMaxSharedBytes + 1}}) {
    const absl::Status status =
        Launch(*stream_, "huge", grid, &AddKernel, 0, 1.0f, static_cast<float*>(nullptr));
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("kernel huge"));
  }
}

using BlockRunDeathTest = testing::Test;

TEST(BlockRunDeathTest, ABarrierThatNotAllThreadsReachIsNamed) {
  EXPECT_DEATH(RunBlocks("odd", {.threads = 64},
                         [] {
                           if (threadIdx.x != 40) __syncthreads();
                         }),
               "kernel odd, block \\(0, 0, 0\\).*thread 0 waits at __syncthreads.*"
               "1 of 64 threads have returned");
}

TEST(BlockRunDeathTest, LanesThatWaitForDifferentThingsAreNamed) {
  EXPECT_DEATH(RunBlocks("parted", {.threads = 32},
                         [] {
                           if (threadIdx.x < 16) {
                             __syncwarp();
                           } else {
                             __shfl_sync(0xffffffffu, 1, 0);
                           }
                         }),
               "kernel parted.*another lane of its warp waits at");
}

TEST(BlockRunDeathTest, AShuffleOfAPartOfAWarpIsRefused) {
  EXPECT_DEATH(RunBlocks("half", {.threads = 32}, [] { __shfl_sync(0xffffu, 1, 0); }),
               "__shfl_sync of a part of a warp");
}

TEST(Intrinsics, RoundOnceEach) {
  const float third = __fdiv_rn(1.0f, 3.0f);
  // Were the product fused into the sum, the rest of its rounding would be left.
  EXPECT_EQ(__fadd_rn(__fmul_rn(third, third), -(third * third)), 0.0f);
  EXPECT_NE(__fmaf_rn(third, third, -(third * third)), 0.0f);
}

}  // namespace
}  // namespace ballast::worker::cuda
