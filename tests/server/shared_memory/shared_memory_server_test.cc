#include "server/shared_memory/shared_memory_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/engine.h"
#include "tests/server/shared_memory/shared_memory_peer.h"
#include "tests/support/eventually.h"
#include "tests/support/messages.h"

namespace ballast::server {
namespace {

using ::testing::StartsWith;

constexpr char kGranted[] = "G";
constexpr int kRanks = 8;
constexpr int64_t kRankElements = 16 * kBlockElements;

// Rank kRanks has no partition.
JobSpec ManyRanks(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.groups = {{.name = "g", .hyper_parameters = {}}};
  spec.layout.world_size = kRanks + 1;
  spec.layout.parameters = {{.name = "w", .shape = {kRanks * kRankElements}}};
  for (int rank = 0; rank < kRanks; ++rank) {
    spec.layout.partitions.push_back({.rank = rank,
                                      .group = 0,
                                      .begin = rank * kRankElements,
                                      .end = (rank + 1) * kRankElements});
  }
  spec.layout.chunk_elements = kBlockElements;
  return spec;
}

int OpenDescriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

class SharedMemoryServerTest : public testing::Test {
 protected:
  void SetUp() override {
    Open({});
    job_ = engine_.CreateJob(ManyRanks("job")).value();
    used_bytes_ = engine_.memory().used_bytes();
  }

  void Open(const SharedMemoryServerLimits& limits) {
    door_ = nullptr;
    door_ = SharedMemoryServer::Open(engine_.instance_id(), limits).value();
  }

  RankHolder Attach(int rank, const std::string& process = "p") {
    const Attachment attachment = job_->Attach({.rank = rank, .process_id = process}).value();
    return {.rank = rank, .process_id = process, .generation = attachment.generation};
  }
  v1::SharedMemoryOffer Offer(int rank, const std::string& process = "p") {
    return door_->Offer(job_, Attach(rank, process)).value();
  }

  bool Shares(int rank) const { return job_->Status().ranks[rank].shared_memory; }
  int64_t AddedBytes() const { return engine_.memory().used_bytes() - used_bytes_; }
  int64_t RankBytes(int rank) const {
    return RankMemoryLayout(job_->layout(), job_->spec().groups, rank).size_bytes();
  }
  // A peer that sends this instead of a token is refused, and leaves nothing behind.
  void ExpectRefused(absl::string_view said, absl::Span<const int> descriptors) {
    SharedMemoryPeer peer(Offer(0).socket());
    ASSERT_TRUE(peer.Say(said, descriptors));
    EXPECT_TRUE(Says(peer.Reply().value_or("")));
    EXPECT_EQ(peer.Reply(), "");
    EXPECT_EQ(peer.memory_file(), -1);
    EXPECT_EQ(AddedBytes(), 0);
  }

  Engine engine_{{.memory_limit_bytes = 64 << 20, .threads = 1}};
  std::unique_ptr<SharedMemoryServer> door_;
  std::shared_ptr<Job> job_;
  int64_t used_bytes_ = 0;
};

TEST_F(SharedMemoryServerTest, GivesMemoryToThePeerWithTheTokenAndDropsItAtTheConnectionsEnd) {
  const v1::SharedMemoryOffer offer = Offer(3);
  {
    SharedMemoryPeer peer(offer.socket());
    ASSERT_TRUE(peer.Say(offer.token()));
    ASSERT_EQ(peer.Reply(), kGranted);
    EXPECT_EQ(peer.memory_bytes(), RankBytes(3));
    EXPECT_EQ(fcntl(peer.memory_file(), F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    EXPECT_TRUE(Shares(3));
    EXPECT_FALSE(Shares(2));
    EXPECT_EQ(AddedBytes(), RankBytes(3));
    EXPECT_EQ(job_->Status().rank_memory_bytes, RankBytes(3));
    // The peer's mapping stays valid, also after the connection and the job have ended.
    peer.Close();
    EXPECT_TRUE(Eventually([&] { return !Shares(3) && AddedBytes() == 0; }));
    peer.memory()[0] = std::byte{1};
    EXPECT_EQ(peer.memory()[0], std::byte{1});
  }
}

TEST_F(SharedMemoryServerTest, RefusesATokenThatIsWrongOrUsedOrReplacedOrTooOld) {
  const v1::SharedMemoryOffer first = Offer(0);
  std::string wrong = first.token();
  wrong.back() ^= 1;
  ExpectRefused(wrong, {});
  ExpectRefused(first.token(), {});  // By the offer that was made for the one before.

  const v1::SharedMemoryOffer used = Offer(0);
  SharedMemoryPeer peer(used.socket());
  ASSERT_TRUE(peer.Say(used.token()));
  ASSERT_EQ(peer.Reply(), kGranted);
  SharedMemoryPeer again(used.socket());
  ASSERT_TRUE(again.Say(used.token()));
  EXPECT_THAT(again.Reply(), testing::Optional(StartsWith("R")));
  EXPECT_TRUE(Shares(0));  // The first is not disturbed.

  Open({.offer = std::chrono::milliseconds(0)});
  const v1::SharedMemoryOffer late = Offer(1);
  SharedMemoryPeer too_late(late.socket());
  ASSERT_TRUE(too_late.Say(late.token()));
  EXPECT_TRUE(Says(too_late.Reply().value_or("")));
}

TEST_F(SharedMemoryServerTest, RefusesJunkAndKeepsNoDescriptorThatComesWithIt) {
  const int descriptors = OpenDescriptors();
  ExpectRefused("x", {});
  ExpectRefused(std::string(31, 'x'), {});
  ExpectRefused(std::string(33, 'x'), {});
  ExpectRefused(std::string(100'000, 'x'), {});
  ExpectRefused("", {});
  ExpectRefused("x", {0, 1, 2});
  // Descriptors that arrive with a valid token are refused all the same.
  ExpectRefused(Offer(1).token(), {0, 1, 2, 0, 1, 2});
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == descriptors; }));
}

TEST_F(SharedMemoryServerTest, TakesMemoryBackFromAPeerThatSendsMore) {
  for (const bool at_once : {false, true}) {
    const v1::SharedMemoryOffer offer = Offer(2);
    SharedMemoryPeer peer(offer.socket());
    ASSERT_TRUE(peer.Say(offer.token()));
    if (at_once) peer.Say(offer.token());
    ASSERT_EQ(peer.Reply(), kGranted);
    if (!at_once) peer.Say("more");
    EXPECT_EQ(peer.Reply(), "");
    EXPECT_TRUE(Eventually([&] { return !Shares(2) && AddedBytes() == 0; }));
  }
}

TEST_F(SharedMemoryServerTest, DropsPeersThatStaySilent) {
  Open({.silence = std::chrono::milliseconds(20)});
  SharedMemoryPeer silent(Offer(0).socket());
  EXPECT_TRUE(Says(silent.Reply().value_or("")));
  EXPECT_EQ(silent.Reply(), "");
}

TEST_F(SharedMemoryServerTest, EndsConnectionsBeyondItsLimitWhileThoseInHandStay) {
  Open({.peers = 2});
  std::vector<std::unique_ptr<SharedMemoryPeer>> served;
  for (const int rank : {0, 1}) {
    const v1::SharedMemoryOffer offer = Offer(rank);
    served.push_back(std::make_unique<SharedMemoryPeer>(offer.socket()));
    ASSERT_TRUE(served.back()->Say(offer.token()));
    ASSERT_EQ(served.back()->Reply(), kGranted);
  }
  const v1::SharedMemoryOffer offer = Offer(2);
  SharedMemoryPeer third(offer.socket());
  EXPECT_TRUE(Says(third.Reply().value_or("")));
  EXPECT_TRUE(Shares(0) && Shares(1));
  served.clear();
  // Its token is still good once there is room.
  EXPECT_TRUE(Eventually([&] { return AddedBytes() == 0; }));
  EXPECT_TRUE(Eventually([&] {
    SharedMemoryPeer again(offer.socket());
    return again.Say(offer.token()) && again.Reply() == kGranted;
  }));
}

TEST_F(SharedMemoryServerTest, DropsTheMemoryOfAProcessThatIsKilled) {
  const v1::SharedMemoryOffer offer = Offer(5);
  const std::string name = offer.socket(), token = offer.token();
  int served[2];
  ASSERT_EQ(pipe(served), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    SharedMemoryPeer peer(name);
    const bool granted = peer.Say(token) && peer.Reply() == kGranted && !peer.memory().empty();
    if (write(served[1], granted ? "y" : "n", 1) != 1) _exit(1);
    while (granted) peer.memory()[0] = std::byte{7};
    _exit(1);
  }
  char answer = 0;
  ASSERT_EQ(read(served[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  EXPECT_TRUE(Shares(5));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(Eventually([&] { return !Shares(5) && AddedBytes() == 0; }));
  close(served[0]);
  close(served[1]);
}

TEST_F(SharedMemoryServerTest, RefusesAHolderWhomAnotherProcessHasReplaced) {
  const v1::SharedMemoryOffer offer = Offer(0);
  Attach(0, "another");
  SharedMemoryPeer peer(offer.socket());
  ASSERT_TRUE(peer.Say(offer.token()));
  EXPECT_THAT(peer.Reply(), testing::Optional(StartsWith("R")));
  EXPECT_TRUE(Eventually([&] { return AddedBytes() == 0; }));
  EXPECT_FALSE(Shares(0));
}

TEST_F(SharedMemoryServerTest, GivesARankNewMemoryWhenThereIsRoomForOneOnly) {
  std::vector<MemoryBudget::Reservation> taken;
  while (engine_.memory().limit_bytes() - engine_.memory().used_bytes() >= 2 * RankBytes(0)) {
    taken.push_back(job_->ReserveRankMemory(0).value());
  }
  used_bytes_ = engine_.memory().used_bytes();
  std::vector<std::unique_ptr<SharedMemoryPeer>> kept;
  // Another process, the same one again without a word, and one that leaves just before.
  for (const std::string process : {"p", "another", "another", "p", "p", "p"}) {
    if (kept.size() >= 4) kept.back()->Close();
    const v1::SharedMemoryOffer offer = Offer(0, process);
    kept.push_back(std::make_unique<SharedMemoryPeer>(offer.socket()));
    ASSERT_TRUE(kept.back()->Say(offer.token()));
    ASSERT_EQ(kept.back()->Reply(), kGranted) << kept.size();
    EXPECT_EQ(AddedBytes(), RankBytes(0));
    EXPECT_TRUE(Shares(0));
    kept.back()->memory()[0] = std::byte{7};
    if (kept.size() < 2 || kept.size() > 4) continue;
    SharedMemoryPeer& before = *kept[kept.size() - 2];
    EXPECT_EQ(before.Reply(), "");
    EXPECT_EQ(before.memory()[0], std::byte{0});  // Its page went back to the system.
  }
}

TEST_F(SharedMemoryServerTest, LooksWhoHoldsTheRankBeforeItMakesMemory) {
  const RankHolder holder = Attach(0);
  const v1::SharedMemoryOffer offer = door_->Offer(job_, holder).value();
  Attach(0, "another");
  std::vector<MemoryBudget::Reservation>
      taken;  // So that making it would fail with another message.
  while (engine_.memory().limit_bytes() - engine_.memory().used_bytes() >= RankBytes(0)) {
    taken.push_back(job_->ReserveRankMemory(0).value());
  }
  SharedMemoryPeer peer(offer.socket());
  ASSERT_TRUE(peer.Say(offer.token()));
  EXPECT_TRUE(Says(peer.Reply().value_or("")));
}

TEST_F(SharedMemoryServerTest, RefusesWithTheSizesWhenTheBudgetIsFull) {
  const v1::SharedMemoryOffer offer = Offer(0);
  std::vector<MemoryBudget::Reservation> taken;
  while (engine_.memory().limit_bytes() - engine_.memory().used_bytes() >= RankBytes(0)) {
    taken.push_back(job_->ReserveRankMemory(0).value());
  }
  SharedMemoryPeer peer(offer.socket());
  ASSERT_TRUE(peer.Say(offer.token()));
  EXPECT_TRUE(Says(peer.Reply().value_or("")));
  EXPECT_EQ(peer.Reply(), "");
}

TEST_F(SharedMemoryServerTest, RefusesTheTokenOfAJobThatIsClosed) {
  const v1::SharedMemoryOffer kept = Offer(0), gone = Offer(1);
  ASSERT_TRUE(engine_.CloseJob("job").ok());
  for (const bool still_referred_to : {true, false}) {
    const v1::SharedMemoryOffer& offer = still_referred_to ? kept : gone;
    if (!still_referred_to) job_ = nullptr;
    SharedMemoryPeer peer(offer.socket());
    ASSERT_TRUE(peer.Say(offer.token()));
    EXPECT_THAT(peer.Reply(), testing::Optional(StartsWith("R")));
  }
}

TEST_F(SharedMemoryServerTest, MakesNoOfferToARankWithoutChunks) {
  EXPECT_EQ(door_->Offer(job_, Attach(kRanks)), std::nullopt);
}

TEST(SharedMemoryServer, OpenedWithANameThatDoesNotFitIsUnavailable) {
  EXPECT_EQ(SharedMemoryServer::Open(std::string(200, 'x')).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ballast::server
