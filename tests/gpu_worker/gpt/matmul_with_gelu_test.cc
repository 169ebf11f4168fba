// Gelu after a library that refuses it: what the fake library gives in one go, in two.
#include "gpu_worker/gpt/matmul_with_gelu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

// Has no algorithm for gelu where m or k is 1, and notes what it was asked for.
class RefusingMatmul final : public DeviceMatmul {
 public:
  struct Asked {
    std::vector<MatmulEpilogue> epilogues;
    bool refuses_all = false;
    absl::Status failure;  // Of every call.
  };
  explicit RefusingMatmul(Asked& asked) : asked_(asked) {}

  absl::Status Run(DeviceStream& stream, const Matmul& matmul) override {
    asked_.epilogues.push_back(matmul.epilogue);
    if (!asked_.failure.ok()) return asked_.failure;
    const bool gelu = matmul.epilogue == MatmulEpilogue::kBiasGelu ||
                      matmul.epilogue == MatmulEpilogue::kGeluBackward;
    if (asked_.refuses_all || (gelu && (matmul.m == 1 || matmul.k == 1))) {
      return absl::InvalidArgumentError(
          absl::StrCat("no algorithm with epilogue ", static_cast<int>(matmul.epilogue)));
    }
    return matmul_->Run(stream, matmul);
  }

 private:
  Asked& asked_;
  const std::unique_ptr<DeviceMatmul> matmul_ = MakeFakeMatmul();
};

class MatmulWithGeluTest : public testing::Test {
 protected:
  struct Result {
    std::vector<BFloat16Bits> out, aux;
  };
  struct Shape {
    int64_t m = 0, n = 0, k = 0;
  };

  BFloat16Bits* Upload(uint64_t seed, int64_t count) {
    std::mt19937_64 random(seed);
    std::vector<BFloat16Bits> values(count);
    for (BFloat16Bits& value : values) {
      value = FloatToBFloat16(std::normal_distribution<float>()(random));
    }
    memory_.push_back(device_.Allocate(count * sizeof(BFloat16Bits), "an operand").value());
    EXPECT_TRUE(stream_->CopyToDevice(memory_.back()->data(), BytesOf(values)).ok());
    EXPECT_TRUE(stream_->Synchronize().ok());
    return memory_.back()->as<BFloat16Bits>();
  }
  static absl::Span<std::byte> BytesOf(std::vector<BFloat16Bits>& values) {
    return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(BFloat16Bits)};
  }
  absl::StatusOr<Result> Run(DeviceMatmul& matmul, const Shape& shape, MatmulEpilogue epilogue) {
    const auto [m, n, k] = shape;
    BFloat16Bits* const out = Upload(9, m * n);
    BFloat16Bits* const aux = Upload(4, m * n);
    const absl::Status status = matmul.Run(*stream_, {.m = m,
                                                      .n = n,
                                                      .k = k,
                                                      .a = Upload(1, m * k),
                                                      .b = Upload(2, k * n),
                                                      .out = out,
                                                      .epilogue = epilogue,
                                                      .bias = Upload(3, n),
                                                      .aux = aux});
    if (!status.ok()) return status;
    Result result{std::vector<BFloat16Bits>(m * n), std::vector<BFloat16Bits>(m * n)};
    EXPECT_TRUE(stream_->CopyToHost(BytesOf(result.out), out).ok());
    EXPECT_TRUE(stream_->CopyToHost(BytesOf(result.aux), aux).ok());
    EXPECT_TRUE(stream_->Synchronize().ok());
    return result;
  }

  FakeDevice device_{{.seed = 2}};
  const std::unique_ptr<DeviceStream> stream_ = device_.CreateStream("compute").value();
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  RefusingMatmul::Asked asked_;
  const std::unique_ptr<DeviceMatmul> matmul_ =
      MakeMatmulWithGelu(device_, std::make_unique<RefusingMatmul>(asked_));
};

TEST_F(MatmulWithGeluTest, GivesInTwoWhatTheLibraryRefusesInOne) {
  const auto whole = MakeFakeMatmul();
  for (const MatmulEpilogue epilogue : {MatmulEpilogue::kBiasGelu, MatmulEpilogue::kGeluBackward}) {
    // The second is smaller, the third larger than what the first took memory for.
    for (const Shape& shape : {Shape{1, 64, 24}, {1, 8, 24}, {40, 64, 1}}) {
      const Result expected = Run(*whole, shape, epilogue).value();
      const absl::StatusOr<Result> result = Run(*matmul_, shape, epilogue);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->aux, expected.aux);
      for (size_t i = 0; i < expected.out.size(); ++i) {
        const float wanted = BFloat16ToFloat(expected.out[i]);
        EXPECT_NEAR(BFloat16ToFloat(result->out[i]), wanted, std::abs(wanted) / 256 + 1e-6) << i;
      }
    }
  }
}

TEST_F(MatmulWithGeluTest, AsksAgainOnlyForWhatWasNotRefused) {
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Run(*matmul_, {1, 8, 16}, MatmulEpilogue::kBiasGelu).ok());
    ASSERT_TRUE(Run(*matmul_, {2, 8, 16}, MatmulEpilogue::kBiasGelu).ok());
  }
  using enum MatmulEpilogue;
  EXPECT_THAT(asked_.epilogues,
              testing::ElementsAre(kBiasGelu, kNone, kBiasGelu, kNone, kBiasGelu));
}

TEST_F(MatmulWithGeluTest, WhatCannotBeDoneInTwoEitherIsTheFirstError) {
  asked_.refuses_all = true;
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(Refused(Run(*matmul_, {1, 8, 16}, MatmulEpilogue::kBiasGelu),
                        absl::StatusCode::kInvalidArgument));
  }
  EXPECT_TRUE(Refused(Run(*matmul_, {1, 8, 16}, MatmulEpilogue::kBias),
                      absl::StatusCode::kInvalidArgument));
  // A library that fails does not refuse.
  asked_ = {.failure = absl::UnavailableError("GPU 0 is lost")};
  EXPECT_EQ(Run(*matmul_, {1, 8, 16}, MatmulEpilogue::kBiasGelu).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(asked_.epilogues.size(), 1);
}

}  // namespace
}  // namespace ballast::worker
