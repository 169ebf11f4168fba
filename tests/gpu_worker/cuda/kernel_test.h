// What tests of kernels have in common. A test file runs on whatever MakeTestDevice makes: it is
// linked once with the tests' own device, and once with a GPU.
//
//   TEST_F(EmbeddingKernels, ForwardAddsTokensAndPositions) {
//     const auto weights = Upload(RandomBFloat16(rows * width, 1));
//     auto out = Poisoned<BFloat16Bits>(rows * width);
//     Run(EmbeddingForward(stream(), shape, ..., out.data()));
//     EXPECT_EQ(Download(out), ...);
#ifndef BALLAST_TESTS_GPU_WORKER_CUDA_KERNEL_TEST_H_
#define BALLAST_TESTS_GPU_WORKER_CUDA_KERNEL_TEST_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "gpu_worker/base/random.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker::cuda {

// NOT_FOUND where there is none: tests are skipped.
absl::StatusOr<std::unique_ptr<Device>> MakeTestDevice();

// Elements of T in the device's memory, `offset` of them past an aligned place.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(std::unique_ptr<DeviceMemory> memory, size_t size, size_t offset)
      : memory_(std::move(memory)), size_(size), offset_(offset) {}
  T* data() const { return memory_->as<T>() + offset_; }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<DeviceMemory> memory_;
  size_t size_;
  size_t offset_;
};

class KernelTest : public testing::Test {
 protected:
  void SetUp() override {
    auto device = MakeTestDevice();
    if (absl::IsNotFound(device.status())) {
      std::cerr << "SKIPPED, NOTHING WAS TESTED: " << device.status() << "\n";
      GTEST_SKIP() << device.status();
    }
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    auto stream = device_->CreateStream("compute");
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
  }

  Device& device() { return *device_; }
  DeviceStream& stream() { return *stream_; }

  // Gives work to the stream, and waits for it.
  void Run(const absl::Status& given) {
    ASSERT_TRUE(given.ok()) << given;
    const absl::Status done = stream_->Synchronize();
    ASSERT_TRUE(done.ok()) << done;
  }

  template <typename T>
  DeviceArray<T> Upload(const std::vector<T>& values, size_t offset = 0) {
    // At least one byte, so that an empty array has an address.
    auto memory =
        device_->Allocate(std::max<size_t>(1, (values.size() + offset) * sizeof(T)), "a test");
    EXPECT_TRUE(memory.ok()) << memory.status();
    DeviceArray<T> array(*std::move(memory), values.size(), offset);
    if (!values.empty()) Run(stream_->CopyToDevice(array.data(), AsBytes(values)));
    return array;
  }

  // NaN in every format.
  template <typename T>
  DeviceArray<T> Poisoned(size_t size, size_t offset = 0) {
    std::vector<T> values(size);
    std::fill_n(reinterpret_cast<unsigned char*>(values.data()), size * sizeof(T), 0xff);
    return Upload(values, offset);
  }

  template <typename T>
  std::vector<T> Download(const DeviceArray<T>& array) {
    std::vector<T> values(array.size());
    if (values.empty()) return values;
    Run(stream_->CopyToHost(
        absl::MakeSpan(reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)),
        array.data()));
    return values;
  }

 private:
  template <typename T>
  static absl::Span<const std::byte> AsBytes(const std::vector<T>& values) {
    return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<DeviceStream> stream_;
};

inline std::vector<float> RandomFloats(size_t count, uint64_t seed, float scale = 1) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = scale * RandomNormal(seed, 0, i);
  return values;
}

// Numbers of every kind: zeros, denormals, the ends of formats and the ties between their values,
// infinities, NaN, any bits at all; and, half of them, ordinary ones.
inline std::vector<float> HardFloats(size_t count, uint64_t seed) {
  static constexpr float kHard[] = {
      0.0f,      -0.0f,           0x1p-149f,   -0x1p-127f,   0x1.fffffcp-127f,
      0x1p-126f, -0x1p-126f,      0x1.8p-126f, 0x1p-24f,     0x1.8p-25f,
      0x1p-25f,  1.00390625f,     1.01171875f, 65519.0f,     65520.0f,
      -65536.0f, 0x1.fefffep127f, 0x1.ffp127f, -0x1.fep127f, 0x1.000002p0f,
      INFINITY,  -INFINITY,       NAN,         1e-15f};
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = RandomBits(seed, 2, i);
    const auto any = static_cast<uint32_t>(bits >> 32);
    if (bits % 8 < 4) {
      values[i] = RandomNormal(seed, 0, i);
    } else if (bits % 8 < 6) {
      values[i] = kHard[any % std::size(kHard)];
    } else {
      std::memcpy(&values[i], &any, sizeof(any));
    }
  }
  return values;
}

// As an array of `dtype`.
inline std::vector<std::byte> ToWire(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * SizeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) StoreElement(bytes.data(), dtype, i, values[i]);
  return bytes;
}
inline std::vector<float> FromWire(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / SizeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) values[i] = LoadElement(bytes.data(), dtype, i);
  return values;
}

inline std::vector<BFloat16Bits> ToBFloat16(const std::vector<float>& values) {
  std::vector<BFloat16Bits> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) bits[i] = FloatToBFloat16(values[i]);
  return bits;
}

inline std::vector<BFloat16Bits> RandomBFloat16(size_t count, uint64_t seed, float scale = 1) {
  return ToBFloat16(RandomFloats(count, seed, scale));
}

template <typename T>
std::vector<T> Widen(const std::vector<BFloat16Bits>& bits) {
  std::vector<T> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) values[i] = BFloat16ToFloat(bits[i]);
  return values;
}

// Half the distance of two neighbouring bf16 values of 1 to 2: what one rounding may change,
// relative.
inline constexpr double kBFloat16Rounding = 1.0 / 256;

// |actual - expected| <= relative * |expected| + absolute, for each; never where one is NaN.
template <typename Actual>
void ExpectClose(const std::string& what, const std::vector<Actual>& actual,
                 const std::vector<double>& expected, double relative, double absolute) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(actual[i]) - expected[i]);
    ASSERT_TRUE(difference <= relative * std::fabs(expected[i]) + absolute)
        << what << " " << i << " of " << actual.size() << ": " << actual[i] << ", expected "
        << expected[i];
  }
}

// Bit for bit, NaN payloads and signs excepted.
template <typename T>
void ExpectSameBits(const std::string& what, const std::vector<T>& actual,
                    const std::vector<T>& expected) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
    ASSERT_EQ(std::memcmp(&actual[i], &expected[i], sizeof(T)), 0)
        << what << " " << i << ": " << actual[i] << ", expected " << expected[i];
  }
}

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_WORKER_CUDA_KERNEL_TEST_H_
