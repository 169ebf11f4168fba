// A GPU that refuses a launch goes on; one whose kernel fails is lost, and every later call returns
// that.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "gpu_worker/cuda/gpu_stream.h"
#include "tests/gpu/launch_test_kernels.h"
#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

using testing::HasSubstr;

class GpuLossTest : public KernelTest {
 protected:
  void ExpectWell() {
    const auto seven = Poisoned<uint32_t>(1);
    Run(StoreSeven(stream(), seven.data()));
    EXPECT_EQ(Download(seven)[0], 7u);
  }

  // Ends the process: with 0 if every call after the loss returns the error of the first.
  [[noreturn]] void LoseGpu() {
    const auto memory = device().Allocate(4, "a test").value();
    const absl::Status given = StoreSeven(stream(), nullptr);
    const absl::Status lost = stream().Synchronize();
    std::cerr << lost << "\n";
    const bool stays = stream().Synchronize() == lost &&
                       static_cast<GpuStream&>(stream()).CheckGpu("a library") == lost &&
                       StoreSeven(stream(), memory->as<uint32_t>()) == lost &&
                       stream().Zero(memory->data(), 4) == lost &&
                       device().Allocate(4, "a test").status() == lost &&
                       device().CreateStream("other").status() == lost;
    std::_Exit(given.ok() && absl::IsUnavailable(lost) && stays ? 0 : 1);
  }
};

TEST_F(GpuLossTest, ALaunchThatIsRefusedLeavesTheGpuWell) {
  const auto seven = Poisoned<uint32_t>(1);
  for (const absl::Status& status :
       {StoreSeven(stream(), seven.data(), /*threads=*/4096),
        StoreSeven(stream(), seven.data(), 1, /*shared_bytes=*/size_t{1} << 20)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("stream compute: kernel store seven"));
  }
  ExpectWell();
}

TEST_F(GpuLossTest, ALaunchWithMoreSharedMemoryThanTheDefaultWorks) {
  const auto seven = Poisoned<uint32_t>(1);
  Run(StoreSeven(stream(), seven.data(), 1024, 96 * 1024));
  EXPECT_EQ(Download(seven)[0], 7u);
  EXPECT_TRUE(static_cast<GpuStream&>(stream()).CheckGpu("a library").ok());
}

// In a process of its own, which is lost with the GPU's context.
TEST_F(GpuLossTest, AKernelThatGoesWrongIsToldInOneLineByAllThatFollows) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LoseGpu(), testing::ExitedWithCode(0), "GPU 0 .*see nvidia-smi and dmesg");
}

}  // namespace
}  // namespace ballast::worker::cuda
