// What device.h promises, of a GPU.
#include "gpu_worker/cuda/cuda_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/gpu_worker/cuda/kernel_test.h"

namespace ballast::worker::cuda {
namespace {

using testing::HasSubstr;

constexpr size_t kBytes = size_t{64} << 20;

size_t Count(const std::vector<std::byte>& bytes, std::byte value) {
  return static_cast<size_t>(std::count(bytes.begin(), bytes.end(), value));
}

class CudaDeviceTest : public KernelTest {
 protected:
  std::unique_ptr<DeviceMemory> Allocate(size_t size_bytes) {
    return device().Allocate(size_bytes, "a test").value();
  }
  std::vector<std::byte> Read(const DeviceMemory& memory) {
    std::vector<std::byte> bytes(memory.size_bytes());
    Run(stream().CopyToHost(absl::MakeSpan(bytes), memory.data()));
    return bytes;
  }
};

TEST_F(CudaDeviceTest, MemoryIsZerosAndCounted) {
  const int64_t before = device().allocated_bytes();
  {
    // What was there before must not show.
    const std::vector<std::byte> noise(kBytes, std::byte{0xAB});
    const auto used = Allocate(kBytes);
    Run(stream().CopyToDevice(used->data(), noise));
  }
  const auto memory = Allocate(kBytes);
  EXPECT_EQ(device().allocated_bytes() - before, static_cast<int64_t>(kBytes));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % 256, 0u);
  const std::vector<std::byte> bytes = Read(*memory);
  EXPECT_EQ(std::count(bytes.begin(), bytes.end(), std::byte{0}), static_cast<int64_t>(kBytes));
}

TEST_F(CudaDeviceTest, SaysHowMuchMemoryIsMissing) {
  const auto status =
      device().Allocate(static_cast<size_t>(device().memory_bytes()) * 2, "activations").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("for activations"));
  EXPECT_NE(Allocate(1), nullptr);  // And goes on.
}

TEST_F(CudaDeviceTest, CopiesThroughPinnedAndOrdinaryMemory) {
  const auto pinned = device().AllocateHost(kBytes, "a test").value();
  EXPECT_TRUE(pinned->pinned());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pinned->bytes().data()) % 4096, 0u);
  std::fill(pinned->bytes().begin(), pinned->bytes().end(), std::byte{0x5C});
  const auto first = Allocate(kBytes);
  const auto second = Allocate(kBytes);
  Run(stream().CopyToDevice(first->data(), pinned->bytes()));
  Run(stream().CopyOnDevice(second->data(), first->data(), kBytes));
  EXPECT_EQ(Count(Read(*second), std::byte{0x5C}), kBytes);
  Run(stream().Zero(second->data(), kBytes));
  EXPECT_EQ(Count(Read(*second), std::byte{0}), kBytes);
}

TEST_F(CudaDeviceTest, PinsMemoryOfOthers) {
  std::vector<std::byte> bytes(kBytes, std::byte{1});
  const auto pinned = device().PinHost(absl::MakeSpan(bytes), "a test").value();
  EXPECT_TRUE(pinned->pinned());
  EXPECT_EQ(pinned->bytes().data(), bytes.data());
}

TEST_F(CudaDeviceTest, StreamsWaitForEventsOnly) {
  const auto other = device().CreateStream("copies").value();
  const auto filled = device().CreateEvent().value();
  EXPECT_TRUE(filled->Done().value());  // Never recorded.
  const auto memory = Allocate(kBytes);
  const auto pinned = device().AllocateHost(kBytes, "a test").value();
  std::fill(pinned->bytes().begin(), pinned->bytes().end(), std::byte{7});
  const auto back = device().AllocateHost(kBytes, "a test").value();
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(stream().Zero(memory->data(), kBytes).ok());
    EXPECT_TRUE(stream().CopyToDevice(memory->data(), pinned->bytes()).ok());
    EXPECT_TRUE(stream().Record(*filled).ok());
    EXPECT_TRUE(other->Wait(*filled).ok());
    EXPECT_TRUE(other->CopyToHost(back->bytes(), memory->data()).ok());
    EXPECT_TRUE(other->Synchronize().ok());
    ASSERT_EQ(std::memcmp(back->bytes().data(), pinned->bytes().data(), kBytes), 0) << i;
  }
}

TEST_F(CudaDeviceTest, EventsTellTheTimeBetweenThem) {
  const auto begin = device().CreateEvent().value();
  const auto end = device().CreateEvent().value();
  const auto memory = Allocate(kBytes);
  EXPECT_TRUE(stream().Record(*begin).ok());
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(stream().Zero(memory->data(), kBytes).ok());
  EXPECT_TRUE(stream().Record(*end).ok());
  EXPECT_TRUE(end->Synchronize().ok());
  EXPECT_GT(end->SecondsSince(*begin).value(), 0);
  EXPECT_LT(end->SecondsSince(*begin).value(), 10);
}

TEST_F(CudaDeviceTest, IsNamedAndKnowsItsKind) {
  EXPECT_THAT(device().name(), HasSubstr("GPU 0 ("));
  EXPECT_GE(device().compute_capability(), 80);
  EXPECT_GT(device().memory_bytes(), int64_t{1} << 30);
}

}  // namespace
}  // namespace ballast::worker::cuda
