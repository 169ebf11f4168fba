#include "gpu_worker/buckets/gradient_staging.h"

#include <gtest/gtest.h>

#include <thread>

#include "cpu_optimizer_service/common/float_format.h"

namespace ballast::worker {
namespace {

Layout OneChunk() {
  return Layout::Create({.world_size = 1,
                         .group_count = 1,
                         .parameters = {{.name = "p", .shape = {256}}},
                         .partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 256}}})
      .value();
}

TEST(GradientStaging, RoundsToTheWireDType) {
  const Layout layout = OneChunk();
  const std::vector<float> values(256, 1.0f + 1.0f / 512);  // Not a bf16 number.
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    GradientStaging staging(layout, {dtype}, 0, absl::Seconds(60));
    const GradientStaging::Payload payload = staging.Fill(0, 0, values).value();
    ASSERT_EQ(payload.bytes.size(), 256 * SizeBytes(dtype));
    EXPECT_EQ(LoadElement(payload.bytes.data(), dtype, 255),
              dtype == DType::kFloat32 ? values[0] : BFloat16ToFloat(FloatToBFloat16(values[0])));
  }
}

TEST(GradientStaging, AChunkWaitsUntilItsLastPayloadIsReleased) {
  const Layout layout = OneChunk();
  GradientStaging staging(layout, {DType::kFloat32}, 0, absl::Seconds(60));
  const std::vector<float> first(256, 1.0f), second(256, 2.0f);
  const GradientStaging::Payload payload = staging.Fill(0, 0, first).value();
  std::thread next([&] { EXPECT_TRUE(staging.Fill(0, 1, second).ok()); });
  // Whenever the other thread comes, the bytes stay what they were until they are released.
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(LoadElement(payload.bytes.data(), DType::kFloat32, i), 1.0f);
  }
  payload.released();
  next.join();
  EXPECT_EQ(LoadElement(payload.bytes.data(), DType::kFloat32, 0), 2.0f);
}

TEST(GradientStaging, FillsTheOptimizersMemoryWhereThereIsSome) {
  const Layout layout = OneChunk();
  GradientStaging staging(layout, {DType::kFloat32}, 0, absl::Seconds(60));
  const std::vector<float> values(256, 1.0f);
  std::vector<std::byte> first(1024), second(1024);
  for (std::vector<std::byte>* memory : {&first, &second}) {
    staging.Use([&](int) { return absl::MakeSpan(*memory); });
    const GradientStaging::Payload payload = staging.Fill(0, 0, values).value();
    EXPECT_EQ(payload.bytes.data(), memory->data());
    EXPECT_EQ(LoadElement(payload.bytes.data(), DType::kFloat32, 255), 1.0f);
    payload.released();
  }
  staging.Use([](int) { return absl::Span<std::byte>(); });
  const GradientStaging::Payload payload = staging.Fill(0, 0, values).value();
  EXPECT_NE(payload.bytes.data(), second.data());
  EXPECT_EQ(LoadElement(payload.bytes.data(), DType::kFloat32, 255), 1.0f);
}

TEST(GradientStaging, APayloadThatIsNeverReleasedIsAnErrorInTime) {
  const Layout layout = OneChunk();
  GradientStaging staging(layout, {DType::kFloat32}, 0, absl::Milliseconds(50));
  const std::vector<float> values(256, 1.0f);
  ASSERT_TRUE(staging.Fill(0, 0, values).ok());
  EXPECT_EQ(staging.Fill(0, 1, values).status().code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace ballast::worker
