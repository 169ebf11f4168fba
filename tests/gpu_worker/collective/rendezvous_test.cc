#include "gpu_worker/collective/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <thread>

#include "tests/gpu_worker/held_port.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;

constexpr std::chrono::milliseconds kShort{300};
constexpr std::chrono::milliseconds kLong{30'000};

std::unique_ptr<Rendezvous> Serve(int world_size, std::chrono::milliseconds timeout = kLong) {
  return Rendezvous::Open({.rank = 0, .world_size = world_size, .timeout = timeout}).value();
}

absl::StatusOr<std::unique_ptr<Rendezvous>> Join(const Rendezvous& served, int rank,
                                                 int world_size) {
  return Rendezvous::Open(
      {.rank = rank, .world_size = world_size, .port = served.port(), .timeout = kLong});
}

TEST(Rendezvous, EveryRankGetsTheValuesOfAllInEachRound) {
  const auto rank_0 = Serve(3);
  const std::array<std::string, 3> values = {"", std::string("bytes\0and more", 14), "2"};
  const auto exchange = [&](Rendezvous& rank, int index) {
    EXPECT_THAT(rank.Exchange(values[index]).value(), testing::ElementsAreArray(values));
    EXPECT_THAT(rank.Exchange(std::to_string(index)).value(), ElementsAre("0", "1", "2"));
  };
  std::thread other([&] { exchange(*Join(*rank_0, 1, 3).value(), 1); });
  std::thread another([&] { exchange(*Join(*rank_0, 2, 3).value(), 2); });
  exchange(*rank_0, 0);
  other.join();
  another.join();
}

TEST(Rendezvous, RoundsAreBounded) {
  const auto rank_0 = Rendezvous::Open({.rank = 0, .world_size = 1}).value();
  for (int round = 0; round < Rendezvous::kMaxRounds; ++round) {
    EXPECT_TRUE(rank_0->Exchange("value").ok());
  }
  EXPECT_EQ(rank_0->Exchange("value").status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(Rendezvous, ARankThatDoesNotArriveIsNamedInTimeAtEveryRank) {
  const auto rank_0 = Serve(4, kShort);
  const auto rank_1 = Join(*rank_0, 1, 4).value();
  std::thread waiting([&] {
    EXPECT_EQ(rank_1->Exchange("1").status().code(), absl::StatusCode::kDeadlineExceeded);
  });
  EXPECT_EQ(rank_0->Exchange("0").status().code(), absl::StatusCode::kDeadlineExceeded);
  waiting.join();
}

TEST(Rendezvous, AnotherWorldSizeIsRefusedWithBothSizes) {
  const auto rank_0 = Serve(2);
  const absl::Status status = Join(*rank_0, 1, 3).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Join(*rank_0, 1, 2).ok());  // The right one may still join.
}

TEST(Rendezvous, ATakenRankIsRefused) {
  const auto rank_0 = Serve(3);
  const auto first = Join(*rank_0, 1, 3).value();
  EXPECT_TRUE(Refused(Join(*rank_0, 1, 3), absl::StatusCode::kAlreadyExists));
  EXPECT_TRUE(Refused(Join(*rank_0, 7, 3), absl::StatusCode::kInvalidArgument));
}

TEST(Rendezvous, RankZeroNamesTheRanksThatAreMissingAndThoseThatWereRefused) {
  const auto rank_0 = Serve(3, kShort);
  EXPECT_FALSE(Join(*rank_0, 1, 2).ok());
  const absl::Status status = rank_0->OwnHost().status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
}

TEST(Rendezvous, ARanksOwnHostIsTheOneItIsReachedAt) {
  const auto rank_0 = Rendezvous::Open({.rank = 0, .world_size = 2, .host = "127.0.0.2"}).value();
  std::thread other([&] {
    const auto rank_1 =
        Rendezvous::Open({.rank = 1, .world_size = 2, .host = "127.0.0.2", .port = rank_0->port()})
            .value();
    EXPECT_EQ(rank_1->OwnHost().value(), "127.0.0.2");
  });
  EXPECT_EQ(rank_0->OwnHost().value(), "127.0.0.2");
  other.join();
}

TEST(Rendezvous, ATakenPortAsksForAnother) {
  const auto first = Serve(2);
  const absl::Status status =
      Rendezvous::Open({.rank = 0, .world_size = 2, .port = first->port()}).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
}

TEST(Rendezvous, AHostThatCannotBeResolvedIsAnErrorAtOnce) {
  for (const int rank : {0, 1}) {
    const absl::Status status =
        Rendezvous::Open({.rank = rank, .world_size = 2, .host = "no host"}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), testing::HasSubstr("MASTER_ADDR"));
  }
}

TEST(Rendezvous, AMissingRankZeroIsAnErrorInTime) {
  const HeldPort held;
  const absl::Status status =
      Rendezvous::Open({.rank = 1, .world_size = 2, .port = held.port(), .timeout = kShort})
          .status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
}

TEST(Rendezvous, SurvivesAStrangerOnItsPort) {
  const auto rank_0 = Serve(2);
  const int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(rank_0->port());
  ASSERT_EQ(connect(stranger, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const std::string request = "GET / HTTP/1.1\r\nHost: here\r\n\r\n";
  ASSERT_EQ(write(stranger, request.data(), request.size()), request.size());
  std::array<char, 4096> answer;
  while (read(stranger, answer.data(), answer.size()) > 0) {
  }  // Until the server closes the connection.
  close(stranger);
  std::thread other([&] {
    EXPECT_THAT(Join(*rank_0, 1, 2).value()->Exchange("1").value(), ElementsAre("0", "1"));
  });
  EXPECT_THAT(rank_0->Exchange("0").value(), ElementsAre("0", "1"));
  other.join();
}

TEST(Rendezvous, ARankThatEndsEndsTheWaitOfTheOthers) {
  const auto rank_0 = Serve(3);
  auto rank_1 = Join(*rank_0, 1, 3).value();
  const auto rank_2 = Join(*rank_0, 2, 3).value();
  std::thread waiting(
      [&] { EXPECT_EQ(rank_2->Exchange("2").status().code(), absl::StatusCode::kUnavailable); });
  rank_1.reset();
  EXPECT_TRUE(Refused(rank_0->Exchange("0"), absl::StatusCode::kUnavailable));
  waiting.join();
}

TEST(Rendezvous, TheEndOfRankZeroEndsTheWaitOfTheOthers) {
  for (int turn = 0;; ++turn) {
    auto rank_0 = Serve(2);
    const auto rank_1 = Join(*rank_0, 1, 2).value();
    absl::Status status;
    std::thread waiting([&] { status = rank_1->Exchange("1").status(); });
    const auto begun = std::chrono::steady_clock::now();
    rank_0.reset();
    waiting.join();
    // After a second gRPC cuts off what came too late to be answered.
    const bool in_time = std::chrono::steady_clock::now() - begun < std::chrono::seconds(1);
    if (!in_time && turn < 10) continue;
    EXPECT_TRUE(Refused(status, absl::StatusCode::kCancelled));
    return;
  }
}

}  // namespace
}  // namespace ballast::worker
