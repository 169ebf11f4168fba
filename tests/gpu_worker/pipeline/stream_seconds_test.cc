#include "gpu_worker/device/stream_seconds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>

#include "tests/gpu_emulator/fake_device.h"

namespace ballast::worker {
namespace {

using std::chrono::milliseconds;

// A device whose time passes only by the work that streams are given.
class StreamSecondsTest : public testing::Test {
 protected:
  void Work(DeviceStream& stream, milliseconds time) {
    ASSERT_TRUE(GiveToFakeStream(stream, "work", [this, time] { now_ += time.count(); }).ok());
  }

  std::atomic<int64_t> now_{0};  // In milliseconds.
  int events_ = 0;
  FakeDevice device_{{.seed = 0,
                      .clock = [this] { return milliseconds(now_); },
                      .fail =
                          [this](absl::string_view operation, absl::string_view) {
                            events_ += operation == "create event";
                            return absl::OkStatus();
                          }}};
  const std::unique_ptr<DeviceStream> stream_ = device_.CreateStream("stream").value();
  StreamSeconds seconds_{device_};
};

TEST_F(StreamSecondsTest, AreOfWhatWasGivenBetweenThePointsAlone) {
  Work(*stream_, milliseconds(1000));
  ASSERT_TRUE(seconds_.Begin(*stream_).ok());
  Work(*stream_, milliseconds(20));
  ASSERT_TRUE(seconds_.End(*stream_).ok());
  Work(*stream_, milliseconds(3000));
  ASSERT_TRUE(seconds_.Begin(*stream_).ok());
  Work(*stream_, milliseconds(300));
  ASSERT_TRUE(seconds_.End(*stream_).ok());
  ASSERT_TRUE(stream_->Synchronize().ok());
  EXPECT_NEAR(seconds_.Take().value(), 0.320, 1e-6);
  EXPECT_EQ(seconds_.Take().value(), 0);
}

TEST_F(StreamSecondsTest, CountAWaitForAnotherStream) {
  const auto other = device_.CreateStream("other").value();
  const auto done = device_.CreateEvent().value();
  ASSERT_TRUE(seconds_.Begin(*stream_).ok());
  Work(*other, milliseconds(70));
  ASSERT_TRUE(other->Record(*done).ok());
  ASSERT_TRUE(stream_->Wait(*done).ok());
  ASSERT_TRUE(seconds_.End(*stream_).ok());
  ASSERT_TRUE(stream_->Synchronize().ok());
  // The order in which a device without hurry begins the two is its own.
  const double waited = seconds_.Take().value();
  EXPECT_TRUE(std::abs(waited - 0.070) < 1e-6 || waited == 0) << waited;
}

TEST_F(StreamSecondsTest, UseTheirEventsAgain) {
  for (int step = 0; step < 5; ++step) {
    for (int pair = 0; pair < 3; ++pair) {
      ASSERT_TRUE(seconds_.Begin(*stream_).ok());
      Work(*stream_, milliseconds(10));
      ASSERT_TRUE(seconds_.End(*stream_).ok());
    }
    ASSERT_TRUE(stream_->Synchronize().ok());
    EXPECT_NEAR(seconds_.Take().value(), 0.030, 1e-6);
  }
  EXPECT_EQ(events_, 6);
}

TEST_F(StreamSecondsTest, AreForgottenWithAPairThatHasNotEnded) {
  ASSERT_TRUE(seconds_.Begin(*stream_).ok());
  Work(*stream_, milliseconds(10));
  ASSERT_TRUE(seconds_.End(*stream_).ok());
  ASSERT_TRUE(seconds_.Begin(*stream_).ok());
  EXPECT_TRUE(seconds_.begun());
  seconds_.Clear();
  EXPECT_FALSE(seconds_.begun());
  ASSERT_TRUE(seconds_.Begin(*stream_).ok());
  Work(*stream_, milliseconds(5));
  ASSERT_TRUE(seconds_.End(*stream_).ok());
  ASSERT_TRUE(stream_->Synchronize().ok());
  EXPECT_NEAR(seconds_.Take().value(), 0.005, 1e-6);
}

}  // namespace
}  // namespace ballast::worker
