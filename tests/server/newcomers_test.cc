#include "server/newcomers.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/failing_memory.h"

namespace ballast::server {
namespace {

using Clock = Newcomers::Clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

TEST(Pace, SpendsWhatIsSavedUpAndThenAShareOfTheTime) {
  Clock::time_point now = Clock::now();
  Pace pace(milliseconds(5), 0.1);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(pace.Spend(milliseconds(1), now));
  EXPECT_FALSE(pace.Spend(milliseconds(1), now));
  EXPECT_EQ(pace.When(milliseconds(1)), now + milliseconds(10));
  now += milliseconds(9);
  EXPECT_FALSE(pace.Spend(milliseconds(1), now));
  now += milliseconds(1);
  EXPECT_TRUE(pace.Spend(milliseconds(1), now));
  EXPECT_FALSE(pace.Spend(milliseconds(1), now));
  now += seconds(100);  // More is not saved up.
  int spent = 0;
  while (spent < 10 && pace.Spend(milliseconds(1), now)) ++spent;
  EXPECT_EQ(spent, 5);
}

TEST(Pace, HundredsOfRanksThatConnectAtOnceDoNotWait) {
  const Clock::time_point now = Clock::now();
  Pace pace(Newcomers::kSaved, Newcomers::kShare);
  for (int i = 0; i < 500; ++i) EXPECT_TRUE(pace.Spend(Newcomers::kTlsCost, now));
}

class NewcomersTest : public testing::Test {
 protected:
  // The client's end.
  FileDescriptor Connect(const std::string& source, bool tls = false) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    ids_[ends[0]] = newcomers_.Add(FileDescriptor(ends[1]), source, tls, now_);
    return FileDescriptor(ends[0]);
  }
  void Say(const FileDescriptor& client, const std::string& words) {
    ASSERT_EQ(send(client.number(), words.data(), words.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(words.size()));
    newcomers_.OnReadable(ids_[client.number()]);
  }
  FileDescriptor Speaker(const std::string& source) {
    FileDescriptor client = Connect(source);
    Say(client, kPreface);
    return client;
  }
  // Keeps those that are handed on.
  int HandOn() {
    int count = 0;
    while (FileDescriptor one = newcomers_.Next(now_)) {
      handed_on_.push_back(std::move(one));
      ++count;
    }
    return count;
  }
  // The last that was handed on is the other end of this.
  bool WasHandedOn(const FileDescriptor& client) {
    char byte = 0;
    return send(handed_on_.back().number(), "x", 1, MSG_NOSIGNAL) == 1 &&
           recv(client.number(), &byte, 1, MSG_DONTWAIT) == 1;
  }

  Clock::time_point now_ = Clock::now();
  std::map<int, Newcomers::Id> ids_;
  std::map<std::string, Clock::time_point> held_;
  std::vector<FileDescriptor> handed_on_;
  // Four plain connections at once, then 400 a second.
  Newcomers newcomers_{[this](const std::string& source) { return held_[source]; },
                       Pace(4 * Newcomers::kCost, 0.1)};
};

TEST_F(NewcomersTest, WhoSaysNothingOrTooLittleIsNotHandedOn) {
  const FileDescriptor silent = Connect("a");
  const FileDescriptor slow = Connect("a");
  const std::string words = kPreface;
  for (size_t i = 0; i + 1 < words.size(); ++i) Say(slow, words.substr(i, 1));
  EXPECT_EQ(HandOn(), 0);
  Say(slow, words.substr(words.size() - 1));
  EXPECT_EQ(HandOn(), 1);
  EXPECT_TRUE(WasHandedOn(slow));
  EXPECT_EQ(newcomers_.size(), 1U);
}

TEST_F(NewcomersTest, TlsBeginsWithAWholeRecord) {
  const FileDescriptor client = Connect("a", /*tls=*/true);
  Say(client, std::string("\x16\x03\x01\x01\x00", 5));
  Say(client, std::string(255, 'x'));
  EXPECT_EQ(HandOn(), 0);
  Say(client, "x");
  EXPECT_EQ(HandOn(), 1);
  // What no record is so long as this says, gRPC says.
  const FileDescriptor liar = Connect("a", /*tls=*/true);
  Say(liar, "\x16\x03\x01\xff\xff");
  EXPECT_EQ(newcomers_.Next(now_).number(), -1);  // The pace: TLS takes four times as much.
  now_ += seconds(1);
  EXPECT_EQ(HandOn(), 1);
}

TEST_F(NewcomersTest, WhoseWordsFindNoMemoryIsHandedOnWhenThereIsSome) {
  // Of a name that is long enough to need memory itself.
  const FileDescriptor client = Connect("ipv6:2001:db8:1:2:3:4:5:6");
  const Newcomers::Id id = ids_[client.number()];
  const std::string words = kPreface;
  ASSERT_EQ(send(client.number(), words.data(), words.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(words.size()));
  int64_t part = 0;
  for (bool done = false;; ++part) {
    ASSERT_LT(part, 100);
    left_until_failure = part;
    try {
      newcomers_.OnReadable(id);
      done = true;
    } catch (const std::bad_alloc&) {
    }
    left_until_failure = -1;
    if (done) break;
    EXPECT_EQ(newcomers_.WhenNext(now_), now_ + Newcomers::kPatience);
    EXPECT_FALSE(newcomers_.Next(now_));
  }
  EXPECT_GE(part, 2);
  EXPECT_EQ(HandOn(), 1);
  EXPECT_TRUE(WasHandedOn(client));
}

TEST_F(NewcomersTest, WhoSpeaksAnotherProtocolIsToldSoByGrpc) {
  const FileDescriptor http = Connect("a");
  Say(http, "GET / HTTP/1.1\r\n");
  EXPECT_EQ(HandOn(), 1);
  now_ += seconds(1);
  const FileDescriptor plain = Connect("a", /*tls=*/true);
  Say(plain, kPreface);
  EXPECT_EQ(HandOn(), 1);
}

TEST_F(NewcomersTest, WhoHasGoneAgainCostsNothing) {
  {
    const FileDescriptor silent = Connect("a");
    const FileDescriptor spoke = Speaker("a");
    const Newcomers::Id id = ids_[silent.number()];
    EXPECT_EQ(shutdown(silent.number(), SHUT_RDWR), 0);
    newcomers_.OnReadable(id);
    EXPECT_EQ(newcomers_.size(), 1U);
  }
  EXPECT_EQ(HandOn(), 0);  // Nobody has told it of the second one.
  EXPECT_EQ(newcomers_.size(), 0U);
  std::vector<FileDescriptor> clients;
  for (int i = 0; i < 5; ++i) clients.push_back(Speaker("a"));
  EXPECT_EQ(HandOn(), 4);
}

TEST_F(NewcomersTest, WhoTakesTooLongIsLetGo) {
  const FileDescriptor silent = Connect("a");
  EXPECT_EQ(newcomers_.WhenNext(now_), now_ + Newcomers::kPatience);
  now_ += Newcomers::kPatience - milliseconds(1);
  newcomers_.DropLate(now_);
  const FileDescriptor later = Connect("a");
  EXPECT_EQ(newcomers_.size(), 2U);
  now_ += milliseconds(1);
  newcomers_.DropLate(now_);
  EXPECT_EQ(newcomers_.size(), 1U);
  char byte = 0;
  EXPECT_EQ(recv(silent.number(), &byte, 1, MSG_DONTWAIT), 0);
  newcomers_.OnReadable(ids_[silent.number()]);  // Which is not here.
}

TEST_F(NewcomersTest, TheOldestGoesWhereThereAreTooMany) {
  newcomers_.DropOldest();  // There is none.
  const FileDescriptor oldest = Connect("a");
  const FileDescriptor speaker = Speaker("b");
  newcomers_.DropOldest();
  char byte = 0;
  EXPECT_EQ(recv(oldest.number(), &byte, 1, MSG_DONTWAIT), 0);
  EXPECT_EQ(newcomers_.size(), 1U);
  EXPECT_EQ(HandOn(), 1);
  EXPECT_TRUE(WasHandedOn(speaker));
}

TEST_F(NewcomersTest, AFloodIsHandedOnAtItsPace) {
  std::vector<FileDescriptor> flood;
  for (int i = 0; i < 200; ++i) flood.push_back(Speaker("a"));
  int handed_on = HandOn();
  EXPECT_EQ(handed_on, 4);
  while (handed_on < 200) {
    const auto next = newcomers_.WhenNext(now_);
    ASSERT_TRUE(next.has_value());
    ASSERT_GT(*next, now_);
    now_ = *next;
    EXPECT_EQ(HandOn(), 1);
    ++handed_on;
  }
  EXPECT_FALSE(newcomers_.WhenNext(now_).has_value());
}

TEST_F(NewcomersTest, AnotherHostsClientGetsInUnderAFlood) {
  std::vector<FileDescriptor> flood;
  for (int i = 0; i < 200; ++i) flood.push_back(Speaker("a"));
  EXPECT_EQ(HandOn(), 4);
  const FileDescriptor honest = Speaker("b");
  for (int i = 0; i < 10; ++i) flood.push_back(Speaker("a"));
  now_ = *newcomers_.WhenNext(now_);
  EXPECT_EQ(HandOn(), 1);
  EXPECT_TRUE(WasHandedOn(honest));
}

TEST_F(NewcomersTest, TheNewestOfAHostGetsInUnderAFlood) {
  std::vector<FileDescriptor> flood;
  for (int i = 0; i < 200; ++i) flood.push_back(Speaker("a"));
  EXPECT_EQ(HandOn(), 4);
  const FileDescriptor honest = Speaker("a");
  now_ = *newcomers_.WhenNext(now_);
  EXPECT_EQ(HandOn(), 1);
  EXPECT_TRUE(WasHandedOn(honest));
}

TEST_F(NewcomersTest, AHostThatIsHeldWaitsAndNoOther) {
  held_["a"] = now_ + seconds(5);
  const FileDescriptor first = Speaker("a");
  const FileDescriptor second = Speaker("b");
  EXPECT_EQ(HandOn(), 1);
  EXPECT_TRUE(WasHandedOn(second));
  EXPECT_EQ(newcomers_.WhenNext(now_), held_["a"]);
  now_ = held_["a"];
  EXPECT_EQ(HandOn(), 1);
  EXPECT_TRUE(WasHandedOn(first));
}

}  // namespace
}  // namespace ballast::server
