// How CUDA's errors are reported, which needs no GPU: each in one line, by the code that launches.
#include "gpu_worker/cuda/gpu_failure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "gpu_worker/cuda/gpu_stream.h"
#include "tests/gpu/launch_test_kernels.h"

namespace ballast::worker {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

struct Expected {
  cudaError_t error;
  absl::StatusCode code;
  const char* advice;
};

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(GpuFailure, ACallThatTheGpuSurvivesIsOneLineThatSaysWhatToDo) {
  GpuFailure failure(0, "GPU 0 (a test)");
  for (const auto& [error, code, advice] :
       {Expected{cudaErrorMemoryAllocation, absl::StatusCode::kResourceExhausted,
                 "smaller --batch"},
        {cudaErrorNoKernelImageForDevice, absl::StatusCode::kFailedPrecondition,
         "CMAKE_CUDA_ARCHITECTURES"},
        {cudaErrorInvalidConfiguration, absl::StatusCode::kInternal, "report"},
        {cudaErrorInvalidValue, absl::StatusCode::kInternal, "report"},
        {cudaErrorLaunchOutOfResources, absl::StatusCode::kInternal, "report"}}) {
    const absl::Status status = failure.Check(error, "stream compute: kernel sums");
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("GPU 0 (a test): stream compute: kernel sums failed: "),
                      HasSubstr(cudaGetErrorName(error)), HasSubstr(advice), Not(HasSubstr("\n"))));
    EXPECT_TRUE(failure.Check(cudaSuccess, "the next call").ok());
  }
}

TEST(GpuFailure, AnErrorThatStaysLosesTheGpuAndIsTheAnswerFromThenOn) {
  for (const cudaError_t error :
       {cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorIllegalInstruction,
        cudaErrorMisalignedAddress, cudaErrorECCUncorrectable, cudaErrorLaunchTimeout,
        cudaErrorDevicesUnavailable, cudaErrorUnknown, static_cast<cudaError_t>(998)}) {
    GpuFailure failure(0, "GPU 0 (a test)");
    const absl::Status first = failure.Check(error, "stream compute: kernel sums");
    EXPECT_EQ(first.code(), absl::StatusCode::kUnavailable) << cudaGetErrorName(error);
    EXPECT_THAT(Message(first), AllOf(HasSubstr("kernel sums failed"),
                                      HasSubstr("see nvidia-smi and dmesg, and start again")));
    EXPECT_EQ(failure.Enter(), first);
    EXPECT_EQ(failure.Check(cudaErrorIllegalAddress, "copy"), first);
    EXPECT_EQ(failure.Check(cudaErrorMemoryAllocation, "allocating"), first);
  }
}

// What a launch uses of a stream; it has no GPU.
class StreamWithoutGpu final : public GpuStream {
 public:
  absl::Status entered;
  std::string checked;  // What was reported to have failed.
  cudaError_t error = cudaSuccess;

  absl::StatusOr<cudaStream_t> Enter() override {
    if (!entered.ok()) return entered;
    return nullptr;
  }
  absl::Status Check(cudaError_t found, absl::string_view what) override {
    error = found;
    checked = std::string(what);
    return absl::DataLossError("as the stream says");
  }
  absl::Status CheckGpu(absl::string_view) override { return Unused(); }

  const std::string& name() const override { return name_; }
  absl::Status Record(DeviceEvent&) override { return Unused(); }
  absl::Status Wait(const DeviceEvent&) override { return Unused(); }
  absl::Status CopyToHost(absl::Span<std::byte>, const void*) override { return Unused(); }
  absl::Status CopyToDevice(void*, absl::Span<const std::byte>) override { return Unused(); }
  absl::Status CopyOnDevice(void*, const void*, size_t) override { return Unused(); }
  absl::Status Zero(void*, size_t) override { return Unused(); }
  absl::Status Synchronize() override { return Unused(); }
  void* native() const override { return nullptr; }

 private:
  static absl::Status Unused() { return absl::UnimplementedError("a launch does not use this"); }
  const std::string name_ = "compute";
};

// Where there is no GPU every launch fails, and where there is one, that of too many threads.
TEST(LaunchOfAKernel, ThatFailsIsTheStreamsToSayWithTheKernelAndItsGrid) {
  StreamWithoutGpu stream;
  const absl::Status status = cuda::StoreSeven(stream, nullptr, 4096);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_NE(stream.error, cudaSuccess);
  EXPECT_EQ(stream.checked,
            "kernel store seven (1 x 1 x 1 blocks of 4096 threads, 0 bytes shared)");
}

TEST(LaunchOfAKernel, IsNotTriedOnAGpuThatIsLost) {
  StreamWithoutGpu stream;
  stream.entered = absl::UnavailableError("the GPU is lost");
  EXPECT_EQ(cuda::StoreSeven(stream, nullptr, 4096), stream.entered);
  EXPECT_EQ(stream.error, cudaSuccess);
}

}  // namespace
}  // namespace ballast::worker
