#include "gpu_worker/pipeline/pinned_spans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "tests/gpu_emulator/fake_device.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

constexpr size_t kPage = 4096;

class PinSpansTest : public testing::Test {
 protected:
  absl::Span<std::byte> At(size_t begin, size_t size_bytes) {
    return {memory_.get() + begin, size_bytes};
  }
  // Begin and size in pages and bytes of what was pinned, in order.
  std::vector<std::pair<size_t, size_t>> Pin(std::vector<absl::Span<std::byte>> spans) {
    std::vector<std::pair<size_t, size_t>> pinned;
    const auto pins = PinSpans(device_, std::move(spans), "a test").value();
    for (const auto& pin : pins) {
      pinned.emplace_back(pin->bytes().data() - memory_.get(), pin->bytes().size());
    }
    return pinned;
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  FakeDevice device_;
  const std::unique_ptr<std::byte, Free> memory_{
      static_cast<std::byte*>(std::aligned_alloc(kPage, 8 * kPage))};
};

TEST_F(PinSpansTest, ThatFollowEachOtherArePinnedAtOnceInWhateverOrder) {
  EXPECT_THAT(Pin({At(2000, 3000), At(0, 2000), At(5000, 5000)}),
              testing::ElementsAre(std::pair(0, 10000)));
}

TEST_F(PinSpansTest, WithAGapInOnePageArePinnedTogetherAndBeyondItApart) {
  EXPECT_THAT(
      Pin({At(0, 100), At(4000, 50), At(3 * kPage, 10), At(7 * kPage, 20)}),
      testing::ElementsAre(std::pair(0, 4050), std::pair(3 * kPage, 10), std::pair(7 * kPage, 20)));
}

TEST_F(PinSpansTest, EmptyOnesAreLeftOut) {
  EXPECT_THAT(Pin({{}, At(100, 100), {}}), testing::ElementsAre(std::pair(100, 100)));
  EXPECT_THAT(Pin({{}, {}}), testing::IsEmpty());
}

TEST(PinSpans, SaysTheDevicesError) {
  FakeDevice device({.fail = [](absl::string_view operation, absl::string_view what) {
    EXPECT_EQ(what, "a test");
    return operation == "pin" ? absl::UnavailableError("lost") : absl::OkStatus();
  }});
  std::vector<std::byte> memory(10);
  EXPECT_TRUE(Refused(PinSpans(device, {absl::MakeSpan(memory)}, "a test"),
                      absl::StatusCode::kUnavailable));
}

}  // namespace
}  // namespace ballast::worker
