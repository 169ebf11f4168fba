#include "server/call_watch.h"

#include <gtest/gtest.h>

#include <latch>
#include <memory>
#include <thread>

namespace ballast::server {
namespace {

using std::chrono::seconds;

// Looks at one call at the times that the test says.
class WatchedCallTest : public testing::Test {
 protected:
  // At least so long after what the call has been told so far.
  void Look(int after_seconds) { call_.Look(WatchedCall::Clock::now() + seconds(after_seconds)); }
  // At most so long after anything that it has been told, however long the test has taken.
  void LookEarly(int after_seconds) { call_.Look(begin_ + seconds(after_seconds)); }

  const WatchedCall::Clock::time_point begin_ = WatchedCall::Clock::now();
  int cancelled_ = 0;
  WatchedCall call_{[this] { ++cancelled_; }, /*patience_seconds=*/60};
};

TEST_F(WatchedCallTest, IsCancelledOnceWhenAWriteTakesTooLong) {
  Look(1000);
  EXPECT_EQ(cancelled_, 0) << "it does not write";
  call_.PeerMustAct();
  LookEarly(60);
  EXPECT_EQ(cancelled_, 0);
  call_.PeerActed();
  call_.PeerMustAct();
  Look(61);
  Look(1000);
  EXPECT_EQ(cancelled_, 1);
}

TEST_F(WatchedCallTest, HasLittleTimeForItsLastWriteWhenItIsOver) {
  call_.PeerMustAct();
  call_.IsOver();
  LookEarly(1);
  EXPECT_EQ(cancelled_, 0);
  Look(10);
  EXPECT_EQ(cancelled_, 1);
}

TEST_F(WatchedCallTest, IsOverOnceItsJobIs) {
  bool closed = false;
  call_.IsOverIf([&] { return closed; });
  Look(0);
  closed = true;
  Look(5);
  EXPECT_EQ(cancelled_, 0);
  Look(15);
  EXPECT_EQ(cancelled_, 1);
}

// It may ask the engine, which has locks of its own.
TEST_F(WatchedCallTest, IsAskedWithoutALock) {
  call_.IsOverIf([this] {
    call_.PeerActed();
    return true;
  });
  Look(0);
  Look(10);
  EXPECT_EQ(cancelled_, 1);
}

TEST_F(WatchedCallTest, KeepsNothingAndCancelsNothingOnceItHasEnded) {
  auto job = std::make_shared<int>(1);
  call_.IsOverIf([job] { return true; });
  call_.IsOver();
  call_.Ended();
  EXPECT_EQ(job.use_count(), 1);
  Look(1000);
  EXPECT_EQ(cancelled_, 0);
}

TEST(WatchedCall, MayEndWithinItsCancelling) {
  std::shared_ptr<WatchedCall> call;
  call = std::make_shared<WatchedCall>([&] { call->Ended(); }, 0);
  call->IsOver();
  call->Look(WatchedCall::Clock::now() + seconds(10));
}

TEST(WatchedCall, IsNotGoneBeforeItsCancellingElsewhereIs) {
  std::latch cancelling(1);
  std::latch goes_on(1);
  bool cancelled = false;
  WatchedCall call(
      [&] {
        cancelling.count_down();
        goes_on.wait();
        cancelled = true;
      },
      0);
  call.IsOver();
  std::thread watch([&] { call.Look(WatchedCall::Clock::now() + seconds(10)); });
  cancelling.wait();
  std::thread lets_go_on([&] { goes_on.count_down(); });
  call.Ended();
  EXPECT_TRUE(cancelled);
  watch.join();
  lets_go_on.join();
}

TEST(CallWatch, CancelsTheCallsThatItWatches) {
  std::latch cancelled(1);
  CallWatch watch;
  const auto call = watch.Watch([&] { cancelled.count_down(); }, /*patience_seconds=*/0);
  call->PeerMustAct();
  cancelled.wait();
  call->Ended();
}

}  // namespace
}  // namespace ballast::server
