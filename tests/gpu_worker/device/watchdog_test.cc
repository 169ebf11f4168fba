#include "gpu_worker/device/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

// An operation on a device, as a test lets it go.
struct Work {
  std::atomic<bool> done = false;
  absl::Status error;
};

class WorkEvent final : public DeviceEvent {
 public:
  explicit WorkEvent(Work& work) : work_(work) {}
  absl::Status Synchronize() override { return absl::UnimplementedError("not to be waited for"); }
  absl::StatusOr<bool> Done() override {
    if (!work_.error.ok()) return work_.error;
    return work_.done.load();
  }
  absl::StatusOr<double> SecondsSince(const DeviceEvent&) const override {
    return absl::UnimplementedError("no clock");
  }

 private:
  Work& work_;
};

// A watchdog without a thread, at a time that stands still until the test moves it.
class WatchdogOfOperations : public testing::Test {
 protected:
  static constexpr absl::Duration kTimeout = absl::Seconds(10);

  absl::Status Give(Work& work, const std::string& operation, const Purpose& purpose) {
    return watchdog_.Watch(operation, purpose, std::make_unique<WorkEvent>(work));
  }
  void Pass(absl::Duration duration) { now_ += duration; }
  absl::Status Look() { return watchdog_.Look(); }

  absl::Time now_ = absl::UnixEpoch();
  absl::Status library_;
  int aborts_ = 0;
  Watchdog watchdog_{{.rank = 3,
                      .timeout = kTimeout,
                      .interval = absl::InfiniteDuration(),
                      .now = [this] { return now_; },
                      .library_error = [this] { return library_; },
                      .abort = [this] { ++aborts_; }}};
};

TEST_F(WatchdogOfOperations, IsQuietWhileTheyAreDoneInTime) {
  Work first, second;
  ASSERT_TRUE(Give(first, "reduce-scatter", {.step = 1, .bucket = 0}).ok());
  ASSERT_TRUE(Give(second, "all-gather", {.step = 1, .bucket = 0}).ok());
  Pass(kTimeout - absl::Seconds(1));
  EXPECT_TRUE(Look().ok());
  first.done = second.done = true;
  Pass(absl::Seconds(5));
  EXPECT_TRUE(Look().ok());
  EXPECT_TRUE(watchdog_.Wait().ok());
  EXPECT_EQ(aborts_, 0);
}

TEST_F(WatchdogOfOperations, NamesTheOneThatIsLateAndAbortsOnce) {
  Work first, second;
  ASSERT_TRUE(Give(first, "reduce-scatter", {.step = 7, .bucket = 2}).ok());
  ASSERT_TRUE(Give(second, "reduce-scatter", {.step = 7, .bucket = 3}).ok());
  first.done = true;
  EXPECT_TRUE(Look().ok());
  Pass(kTimeout);
  const absl::Status status = Look();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(aborts_, 1);

  second.done = true;  // Too late: ranks may be at different operations now.
  EXPECT_EQ(Look(), status);
  EXPECT_EQ(watchdog_.Wait(), status);
  EXPECT_EQ(Give(first, "all-gather", {}), status);
  EXPECT_EQ(aborts_, 1);
}

TEST_F(WatchdogOfOperations, CountsTheTimeOfEachFromTheEndOfTheOneBefore) {
  Work first, second;
  ASSERT_TRUE(Give(first, "reduce-scatter", {.step = 1, .bucket = 0}).ok());
  ASSERT_TRUE(Give(second, "reduce-scatter", {.step = 1, .bucket = 1}).ok());
  Pass(absl::Seconds(9));
  first.done = true;
  EXPECT_TRUE(Look().ok());
  Pass(absl::Seconds(9));  // 18 s after it was given, 9 s after its turn.
  EXPECT_TRUE(Look().ok());
  Pass(absl::Seconds(1));
  EXPECT_EQ(Look().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(WatchdogOfOperations, PassesOnWhatTheLibraryReports) {
  Work work;
  ASSERT_TRUE(Give(work, "all-gather", {.step = 2, .bucket = 5}).ok());
  library_ = absl::UnavailableError("remote process exited");
  const absl::Status status = Look();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
  EXPECT_EQ(aborts_, 1);
}

TEST_F(WatchdogOfOperations, PassesOnThatTheDeviceIsLost) {
  Work work;
  ASSERT_TRUE(Give(work, "all-gather", {.step = 2, .bucket = 5}).ok());
  work.error = absl::UnavailableError("GPU 0 is lost");
  EXPECT_TRUE(Refused(Look(), absl::StatusCode::kUnavailable));
  EXPECT_EQ(aborts_, 1);
}

TEST_F(WatchdogOfOperations, TakesAnErrorOfACallAsItsOwn) {
  const absl::Status status = watchdog_.Fail("all-gather", {.step = 4, .bucket = 1},
                                             absl::UnavailableError("invalid usage"));
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
  EXPECT_EQ(watchdog_.Wait(), status);
  EXPECT_EQ(aborts_, 1);
}

TEST_F(WatchdogOfOperations, GivesEventsBackOnceTheirOperationIsDone) {
  Work work;
  ASSERT_TRUE(Give(work, "all-gather", {}).ok());
  EXPECT_EQ(watchdog_.TakeEvent(), nullptr);
  work.done = true;
  ASSERT_TRUE(Look().ok());
  EXPECT_NE(watchdog_.TakeEvent(), nullptr);
  EXPECT_EQ(watchdog_.TakeEvent(), nullptr);
}

// With its own thread and the real time: it aborts without a call.
TEST(WatchdogThread, AbortsWhatNobodyWaitsFor) {
  Work work;
  absl::Notification aborted;
  Watchdog watchdog({.rank = 0,
                     .timeout = absl::Milliseconds(20),
                     .interval = absl::Milliseconds(1),
                     .abort = [&] { aborted.Notify(); }});
  ASSERT_TRUE(
      watchdog.Watch("reduce-scatter", {.step = 1}, std::make_unique<WorkEvent>(work)).ok());
  EXPECT_TRUE(aborted.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_EQ(watchdog.Wait().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(WatchdogThread, LooksBesideOthersThatWait) {
  std::vector<Work> works(200);
  Watchdog watchdog({.interval = absl::Microseconds(10)});
  std::thread device([&] {
    for (Work& work : works) {
      work.done = true;
      std::this_thread::yield();
    }
  });
  for (size_t i = 0; i < works.size(); ++i) {
    ASSERT_TRUE(
        watchdog.Watch("all-gather", {.step = i}, std::make_unique<WorkEvent>(works[i])).ok());
    if (i % 7 == 0) EXPECT_TRUE(watchdog.Wait().ok());
  }
  EXPECT_TRUE(watchdog.Wait().ok());
  device.join();
  for (const Work& work : works) EXPECT_TRUE(work.done);
}

}  // namespace
}  // namespace ballast::worker
