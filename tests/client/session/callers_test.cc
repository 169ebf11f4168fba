#include "client/session/callers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>

namespace ballast::client {
namespace {

TEST(Callers, AreAwaitedUntilTheLastHasLeft) {
  Callers callers;
  callers.AwaitNone();  // No thread is inside.
  std::optional<Callers::Entry> first(callers);
  std::optional<Callers::Entry> second(callers);
  std::atomic<int> left = 0;
  std::thread leaver([&] {
    ++left;
    first.reset();
    ++left;
    second.reset();
  });
  callers.AwaitNone();
  EXPECT_EQ(left, 2);
  leaver.join();
}

}  // namespace
}  // namespace ballast::client
