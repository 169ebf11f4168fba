#include "client/send_window.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

namespace ballast::client {
namespace {

using LetGo = std::function<void()>;

// Sends `bytes` and keeps what the transport has to call.
absl::Status SendBytes(SendWindow& window, int64_t bytes, std::function<void()> released,
                       std::vector<LetGo>& transport) {
  return window.Send(bytes, std::move(released),
                     [&](LetGo let_go) { transport.push_back(std::move(let_go)); });
}

void LetAllGo(std::vector<LetGo>& transport) {
  for (LetGo& let_go : transport) let_go();
  transport.clear();
}

TEST(SendWindow, ReleasesOnceAfterAcknowledgementAndLettingGo) {
  SendWindow window(1000);
  std::vector<LetGo> transport;
  int first = 0;
  int second = 0;
  ASSERT_TRUE(SendBytes(
                  window, 10, [&] { ++first; }, transport)
                  .ok());
  ASSERT_TRUE(SendBytes(
                  window, 20, [&] { ++second; }, transport)
                  .ok());
  EXPECT_EQ(window.unacknowledged_bytes(), 30);

  // Acknowledged, but the transport still reads the bytes.
  ASSERT_TRUE(window.Acknowledge(1).ok());
  EXPECT_EQ(window.unacknowledged_bytes(), 20);
  EXPECT_EQ(first, 0);
  LetAllGo(transport);
  EXPECT_EQ(first, 1);
  // The transport has let go, but the service has not acknowledged.
  EXPECT_EQ(second, 0);
  ASSERT_TRUE(window.Acknowledge(2).ok());
  EXPECT_EQ(second, 1);
  ASSERT_TRUE(window.Acknowledge(2).ok());
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 1);
}

TEST(SendWindow, BlocksUntilAcknowledgedWhenFull) {
  SendWindow window(100);
  std::vector<LetGo> transport;
  ASSERT_TRUE(SendBytes(window, 60, nullptr, transport).ok());
  std::atomic<bool> sent = false;
  std::atomic<bool> acknowledged = false;
  std::thread sender([&] {
    EXPECT_TRUE(window
                    .Send(60, nullptr,
                          [&](LetGo let_go) {
                            EXPECT_TRUE(acknowledged);
                            transport.push_back(std::move(let_go));
                          })
                    .ok());
    sent = true;
  });
  // Gives a window that does not block the time to show it; one that does cannot fail here.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  while (!sent && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  EXPECT_FALSE(sent);
  acknowledged = true;
  ASSERT_TRUE(window.Acknowledge(1).ok());
  sender.join();
  EXPECT_EQ(window.unacknowledged_bytes(), 60);
  LetAllGo(transport);
}

TEST(SendWindow, GivesUpAfterItsTimeoutAndSendsNothing) {
  SendWindow window(100, absl::Milliseconds(20));
  std::vector<LetGo> transport;
  int released = 0;
  ASSERT_TRUE(SendBytes(window, 60, nullptr, transport).ok());
  const absl::Status status = SendBytes(
      window, 60, [&] { ++released; }, transport);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "the service left 60 payload bytes unacknowledged for 20ms");
  EXPECT_EQ(released, 1);
  EXPECT_EQ(transport.size(), 1u);
  // It was not counted: the next message is the second.
  ASSERT_TRUE(window.Acknowledge(1).ok());
  EXPECT_TRUE(SendBytes(window, 60, nullptr, transport).ok());
  EXPECT_EQ(window.Acknowledge(3).code(), absl::StatusCode::kInternal);
  LetAllGo(transport);
}

TEST(SendWindow, PassesAPayloadLargerThanItselfWhenEmpty) {
  SendWindow window(100);
  std::vector<LetGo> transport;
  EXPECT_TRUE(SendBytes(window, 1000, nullptr, transport).ok());
  LetAllGo(transport);
}

TEST(SendWindow, CountsControlMessagesInTheNumbers) {
  SendWindow window(100);
  std::vector<LetGo> transport;
  int released = 0;
  int controls = 0;
  ASSERT_TRUE(window.SendControl([&] { ++controls; }).ok());
  ASSERT_TRUE(SendBytes(
                  window, 10, [&] { ++released; }, transport)
                  .ok());
  LetAllGo(transport);
  EXPECT_EQ(controls, 1);
  ASSERT_TRUE(window.Acknowledge(1).ok());
  EXPECT_EQ(released, 0);
  ASSERT_TRUE(window.Acknowledge(2).ok());
  EXPECT_EQ(released, 1);
}

TEST(SendWindow, RefusesAcknowledgementOfMoreThanWasSent) {
  SendWindow window(100);
  ASSERT_TRUE(window.SendControl([] {}).ok());
  EXPECT_EQ(window.Acknowledge(2).code(), absl::StatusCode::kInternal);
}

TEST(SendWindow, ReleasesAndRefusesWhenClosed) {
  SendWindow window(100);
  std::vector<LetGo> transport;
  int released = 0;
  ASSERT_TRUE(SendBytes(
                  window, 100, [&] { ++released; }, transport)
                  .ok());
  std::thread sender([&] {
    std::vector<LetGo> unused;
    const absl::Status status = SendBytes(
        window, 100, [&] { ++released; }, unused);
    EXPECT_EQ(status.message(), "broken");
    EXPECT_TRUE(unused.empty());
  });
  window.Close(absl::UnavailableError("broken"));
  window.Close(absl::UnavailableError("later"));
  sender.join();
  EXPECT_EQ(released, 1);  // The refused one; the transport holds the other.
  LetAllGo(transport);
  EXPECT_EQ(released, 2);
  EXPECT_EQ(window.SendControl([] {}).message(), "broken");
}

TEST(SendWindow, DestructionWaitsForTheTransport) {
  std::vector<LetGo> transport;
  std::atomic<bool> let_go = false;
  std::atomic<bool> destroyed = false;
  auto window = std::make_unique<SendWindow>(100);
  ASSERT_TRUE(SendBytes(
                  *window, 10, [&] { EXPECT_TRUE(let_go); }, transport)
                  .ok());
  std::thread owner([&] {
    window.reset();
    EXPECT_TRUE(let_go);
    destroyed = true;
  });
  EXPECT_FALSE(destroyed);
  let_go = true;
  LetAllGo(transport);
  owner.join();
  EXPECT_TRUE(destroyed);
}

TEST(SendWindow, ReleaseMaySendAgain) {
  SendWindow window(100);
  std::vector<LetGo> transport;
  bool again = false;
  ASSERT_TRUE(SendBytes(
                  window, 100, [&] { again = window.SendControl([] {}).ok(); }, transport)
                  .ok());
  LetAllGo(transport);
  ASSERT_TRUE(window.Acknowledge(1).ok());
  EXPECT_TRUE(again);
}

}  // namespace
}  // namespace ballast::client
