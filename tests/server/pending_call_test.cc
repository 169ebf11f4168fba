#include "server/pending_call.h"

#include <gtest/gtest.h>

namespace ballast::server {
namespace {

TEST(PendingCall, CancelsWhatItWaitsForOnce) {
  int cancelled = 0;
  PendingCall call;
  call.Await(Pending([&] { ++cancelled; }));
  EXPECT_FALSE(call.cancelled());
  EXPECT_EQ(cancelled, 0);
  call.Cancel();
  call.Cancel();
  EXPECT_TRUE(call.cancelled());
  EXPECT_EQ(cancelled, 1);
}

TEST(PendingCall, CancelsAtOnceWhatIsStartedAfterTheRpcIsCancelled) {
  int cancelled = 0;
  PendingCall call;
  call.Cancel();
  call.Await(Pending([&] { ++cancelled; }));
  EXPECT_EQ(cancelled, 1);
}

TEST(PendingCall, MayBeCancelledFromWhatItCancels) {
  PendingCall call;
  call.Await(Pending([&] { call.Cancel(); }));
  call.Cancel();
  EXPECT_TRUE(call.cancelled());
}

}  // namespace
}  // namespace ballast::server
