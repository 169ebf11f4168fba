#include "gpu_worker/collective/tcp_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <thread>

#include "gpu_worker/collective/socket.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;

constexpr std::chrono::milliseconds kShort{200};

std::unique_ptr<TcpStore> Serve(int world_size,
                                std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  return TcpStore::Open({.rank = 0, .world_size = world_size, .timeout = timeout}).value();
}

absl::StatusOr<std::unique_ptr<TcpStore>> Join(const TcpStore& served, int rank, int world_size) {
  return TcpStore::Open({.rank = rank,
                         .world_size = world_size,
                         .port = served.port(),
                         .timeout = std::chrono::seconds(30)});
}

TEST(TcpStore, EveryRankSeesWhatAnotherSet) {
  const auto rank_0 = Serve(3);
  const auto rank_1 = Join(*rank_0, 1, 3).value();
  const auto rank_2 = Join(*rank_0, 2, 3).value();
  ASSERT_TRUE(rank_1->Set("from 1", std::string("bytes\0and more", 14)).ok());
  ASSERT_TRUE(rank_0->Set("from 0", "").ok());
  EXPECT_EQ(rank_0->Get("from 1").value(), std::string("bytes\0and more", 14));
  EXPECT_EQ(rank_2->Get("from 1").value(), std::string("bytes\0and more", 14));
  EXPECT_EQ(rank_2->Get("from 0").value(), "");
}

TEST(TcpStore, AGetWaitsForItsKey) {
  const auto rank_0 = Serve(2);
  const auto rank_1 = Join(*rank_0, 1, 2).value();
  std::thread getter([&] { EXPECT_EQ(rank_1->Get("late").value(), "here"); });
  ASSERT_TRUE(rank_0->Set("late", "here").ok());
  getter.join();
}

TEST(TcpStore, AKeyThatNobodySetsIsAnErrorInTime) {
  const auto rank_0 = Serve(2, kShort);
  const auto rank_1 = Join(*rank_0, 1, 2).value();
  EXPECT_EQ(rank_0->Get("never").status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(rank_1->Get("never").status().message(), HasSubstr("nobody set the key never"));
}

TEST(TcpStore, AnotherWorldSizeIsRefusedWithBothSizes) {
  const auto rank_0 = Serve(2);
  const absl::Status status = Join(*rank_0, 1, 3).status();
  EXPECT_THAT(status.message(), HasSubstr("WORLD_SIZE=3 but rank 0 with 2"));
  EXPECT_TRUE(Join(*rank_0, 1, 2).ok());  // The right one may still come.
}

TEST(TcpStore, ATakenRankIsRefused) {
  const auto rank_0 = Serve(3);
  const auto first = Join(*rank_0, 1, 3).value();
  EXPECT_THAT(Join(*rank_0, 1, 3).status().message(), HasSubstr("two workers"));
  EXPECT_THAT(Join(*rank_0, 7, 3).status().message(), HasSubstr("RANK=7"));
}

TEST(TcpStore, RankZeroSaysWhoDidNotComeAndWhoWasRefused) {
  const auto rank_0 = Serve(3, kShort);
  EXPECT_FALSE(Join(*rank_0, 1, 2).ok());
  const absl::Status status = rank_0->OwnHost().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("rank 1 and 1 more did not come"));
  EXPECT_THAT(status.message(), HasSubstr("refused: rank 1 was started with WORLD_SIZE=2"));
}

TEST(TcpStore, ARanksOwnHostIsTheOneItIsReachedAt) {
  const auto rank_0 = TcpStore::Open({.rank = 0, .world_size = 2, .host = "127.0.0.2"}).value();
  const auto rank_1 =
      TcpStore::Open({.rank = 1, .world_size = 2, .host = "127.0.0.2", .port = rank_0->port()})
          .value();
  EXPECT_EQ(rank_0->OwnHost().value(), "127.0.0.2");
  EXPECT_EQ(rank_1->OwnHost().value(), "127.0.0.2");
}

TEST(TcpStore, ATakenPortSaysToChooseAnother) {
  const auto first = Serve(2);
  const absl::Status status =
      TcpStore::Open({.rank = 0, .world_size = 2, .port = first->port()}).status();
  EXPECT_THAT(status.message(), HasSubstr("choose another MASTER_PORT"));
}

TEST(TcpStore, AMissingRankZeroIsAnErrorInTime) {
  // A port that is held, so that nobody else takes it, but on which nobody listens.
  const Socket held(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(held.descriptor(), reinterpret_cast<const sockaddr*>(&loopback), sizeof(loopback)),
            0);
  const absl::Status status =
      TcpStore::Open({.rank = 1, .world_size = 2, .port = held.port(), .timeout = kShort}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("rank 1 cannot reach rank 0"));
}

TEST(TcpStore, SurvivesAStrangerOnItsPort) {
  const auto rank_0 = Serve(2);
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const Socket stranger = Socket::Connect("127.0.0.1", rank_0->port(), deadline).value();
  const std::string request = "GET / HTTP/1.1\r\nHost: here\r\n\r\n";
  ASSERT_TRUE(
      stranger.Write({reinterpret_cast<const std::byte*>(request.data()), request.size()}, deadline)
          .ok());
  std::array<std::byte, 1> answer;
  EXPECT_EQ(stranger.Read(absl::MakeSpan(answer), deadline).code(), absl::StatusCode::kUnavailable);
  const auto rank_1 = Join(*rank_0, 1, 2).value();
  ASSERT_TRUE(rank_1->Set("key", "value").ok());
  EXPECT_EQ(rank_0->Get("key").value(), "value");
}

TEST(TcpStore, ARankThatEndsEndsTheWaitForItsKey) {
  const auto rank_0 = Serve(3);
  auto rank_1 = Join(*rank_0, 1, 3).value();
  const auto rank_2 = Join(*rank_0, 2, 3).value();
  ASSERT_TRUE(rank_1->Set("set", "here").ok());
  std::thread getter(
      [&] { EXPECT_THAT(rank_2->Get("never").status().message(), HasSubstr("rank 1 ended")); });
  rank_1.reset();
  EXPECT_THAT(rank_0->Get("never").status().message(), HasSubstr("rank 1 ended"));
  getter.join();
  EXPECT_EQ(rank_0->Get("set").value(), "here");
}

TEST(TcpStore, EndingRankZeroEndsAWaitingRank) {
  auto rank_0 = Serve(2);
  const auto rank_1 = Join(*rank_0, 1, 2).value();
  std::thread getter([&] { EXPECT_FALSE(rank_1->Get("never").ok()); });
  rank_0.reset();
  getter.join();
}

}  // namespace
}  // namespace ballast::worker
