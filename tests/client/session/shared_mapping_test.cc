#include "client/session/shared_mapping.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>

#include "tests/client/job_for_tests.h"
#include "tests/client/session/scripted_session.h"
#include "tests/client/shared_memory_server_for_tests.h"
#include "tests/support/eventually.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

constexpr int kSealed = F_SEAL_SHRINK | F_SEAL_GROW;

RankMemoryLayout Places() {
  const JobSpec job = SmallJob("j", 2);
  return {Layout::Create(job.layout).value(), job.groups, 0};
}

size_t OpenDescriptors() {
  return static_cast<size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

absl::StatusOr<std::unique_ptr<SharedMapping>> ConnectTo(const v1::SharedMemoryOffer& offer,
                                                         absl::Duration limit = absl::Seconds(20)) {
  return SharedMapping::Connect(offer, Places(), limit);
}

// Connect's result if the server answers this way. No descriptor that it received stays open.
absl::Status Refusal(std::function<void(int connection)> answer) {
  SharedMemoryServerForTests server(std::move(answer));
  const size_t before = OpenDescriptors();
  const absl::Status status = ConnectTo(server.offer()).status();
  // The server has the other end of the connection.
  EXPECT_TRUE(Eventually([&] { return server.hangups() == 1; }));
  EXPECT_EQ(OpenDescriptors(), before);
  return status;
}

TEST(SharedMapping, IsSeenByBothEnds) {
  MemoryFile file(Places());
  file.WriteWeights(0, std::string(512, 'w'));
  SharedMemoryServerForTests server([&](int connection) { Hand(connection, "G", {file.file()}); });
  const auto shared = ConnectTo(server.offer());
  ASSERT_TRUE(shared.ok()) << shared.status();
  const absl::Span<std::byte> gradient = (*shared)->gradient(0);
  ASSERT_EQ(gradient.size(), 512u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(gradient.data()) % 64, 0u);
  std::fill(gradient.begin(), gradient.end(), std::byte{'g'});
  EXPECT_EQ(file.gradient(0), std::string(512, 'g'));
  const absl::Span<std::byte> weights = (*shared)->weights(0);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(weights.data()), weights.size()),
            std::string(512, 'w'));
}

TEST(SharedMapping, HasNoPlaceForChunksOfOtherRanks) {
  MemoryFile file(Places());
  SharedMemoryServerForTests server([&](int connection) { Hand(connection, "G", {file.file()}); });
  const auto shared = ConnectTo(server.offer());
  ASSERT_TRUE(shared.ok()) << shared.status();
  const Layout layout = Layout::Create(SmallJob("j", 2).layout).value();
  for (int chunk : layout.chunks_of_rank(1)) {
    EXPECT_TRUE((*shared)->gradient(chunk).empty());
    EXPECT_TRUE((*shared)->weights(chunk).empty());
  }
}

TEST(SharedMapping, KeepsItsConnectionOpenWhileItLives) {
  MemoryFile file(Places());
  SharedMemoryServerForTests server([&](int connection) { Hand(connection, "G", {file.file()}); });
  const size_t before = OpenDescriptors();
  auto shared = ConnectTo(server.offer());
  ASSERT_TRUE(shared.ok()) << shared.status();
  // Both ends of the connection, and not the file.
  EXPECT_EQ(OpenDescriptors(), before + 2);
  EXPECT_EQ(server.hangups(), 0);
  shared->reset();
  EXPECT_TRUE(Eventually([&] { return server.hangups() == 1; }));
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(SharedMapping, IsNotForAForkedProcessThatOutlivesIt) {
  MemoryFile file(Places());
  SharedMemoryServerForTests server([&](int connection) { Hand(connection, "G", {file.file()}); });
  auto shared = ConnectTo(server.offer());
  ASSERT_TRUE(shared.ok()) << shared.status();
  const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGE_SIZE));
  const uintptr_t page =
      reinterpret_cast<uintptr_t>((*shared)->gradient(0).data()) / page_bytes * page_bytes;
  const auto is_mapped = [page] {
    unsigned char resident;
    return mincore(reinterpret_cast<void*>(page), 1, &resident) == 0;
  };
  ASSERT_TRUE(is_mapped());
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[1]);
    const bool mapped = is_mapped();
    char nothing;
    _exit(read(ends[0], &nothing, 1) == 0 && !mapped ? 0 : 1);
  }
  ASSERT_GT(child, 0);
  shared->reset();
  EXPECT_TRUE(Eventually([&] { return server.hangups() == 1; })) << "while the child lives";
  close(ends[1]);
  close(ends[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(SharedMapping, RefusesAFileThatCouldShrinkOrGrow) {
  for (const int seals : {0, F_SEAL_SHRINK, F_SEAL_GROW}) {
    MemoryFile file(Places().size_bytes(), seals, Places());
    EXPECT_TRUE(Refused(Refusal([&](int connection) { Hand(connection, "G", {file.file()}); }),
                        absl::StatusCode::kFailedPrecondition))
        << seals;
  }
}

TEST(SharedMapping, RefusesAFileOfAnotherSize) {
  for (const int64_t more : {-4096, -1, 1, 4096}) {
    MemoryFile file(Places().size_bytes() + more, kSealed, Places());
    EXPECT_TRUE(Refused(Refusal([&](int connection) { Hand(connection, "G", {file.file()}); }),
                        absl::StatusCode::kFailedPrecondition))
        << more;
  }
}

TEST(SharedMapping, RefusesWhatIsNoMemoryFile) {
  const int file = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_TRUE(Refused(Refusal([&](int connection) { Hand(connection, "G", {file}); }),
                      absl::StatusCode::kFailedPrecondition));
  close(file);
}

TEST(SharedMapping, RefusesAFileOfReservedHugePages) {
  const int file = memfd_create("ballast-test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
  if (file < 0) GTEST_SKIP() << "this system has no such files";
  EXPECT_EQ(fcntl(file, F_ADD_SEALS, kSealed), 0);
  EXPECT_TRUE(Refused(Refusal([&](int connection) { Hand(connection, "G", {file}); }),
                      absl::StatusCode::kFailedPrecondition));
  close(file);
}

TEST(SharedMapping, RefusesAFileThatCannotBeWritten) {
  MemoryFile file(Places());
  const int readable =
      open(absl::StrCat("/proc/self/fd/", file.file()).c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(readable, 0);
  EXPECT_TRUE(Refused(Refusal([&](int connection) { Hand(connection, "G", {readable}); }),
                      absl::StatusCode::kFailedPrecondition));
  close(readable);
}

TEST(SharedMapping, RefusesAnswersOfAnotherForm) {
  MemoryFile file(Places());
  const int fd = file.file();
  EXPECT_TRUE(Refused(Refusal([](int connection) { Hand(connection, "G", {}); }),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(Refusal([&](int connection) {
                        Hand(connection, "G", {fd, fd});
                      }),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(Refusal([&](int connection) {
                        Hand(connection, "G", {fd, fd, fd, fd, fd, fd, fd, fd, fd, fd, fd, fd});
                      }),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(Refusal([&](int connection) { Hand(connection, "GG", {fd}); }),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(Refusal([&](int connection) { Hand(connection, "x", {fd}); }),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(Refusal([&](int connection) { Hand(connection, std::string(600, 'R'), {}); }),
                      absl::StatusCode::kFailedPrecondition));
}

TEST(SharedMapping, SaysWhyItWasRefused) {
  MemoryFile file(Places());
  EXPECT_TRUE(Refused(
      Refusal([&](int connection) { Hand(connection, "Rthe token is spent\x1b", {file.file()}); }),
      absl::StatusCode::kFailedPrecondition));
}

TEST(SharedMapping, IsUnavailableWhereTheServiceHangsUp) {
  EXPECT_TRUE(Refused(Refusal([](int connection) { shutdown(connection, SHUT_RDWR); }),
                      absl::StatusCode::kUnavailable));
}

TEST(SharedMapping, IsUnavailableWhereTheServiceIsSilent) {
  SharedMemoryServerForTests server([](int) {});
  const absl::Time start = absl::Now();
  EXPECT_TRUE(
      Refused(ConnectTo(server.offer(), absl::Milliseconds(30)), absl::StatusCode::kUnavailable));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(30));
}

TEST(SharedMapping, IsUnavailableIfNoConnectionIsAccepted) {
  v1::SharedMemoryOffer offer;
  offer.set_token(std::string(32, 't'));
  offer.set_socket(absl::StrCat("ballast-test-full-", getpid()));
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, offer.socket().data(), offer.socket().size());
  const auto size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + offer.socket().size());
  ASSERT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 0), 0);
  // The first fills the queue, the later ones wait for room in it.
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(Refused(ConnectTo(offer, absl::Milliseconds(30)), absl::StatusCode::kUnavailable));
  }
  close(listener);
}

TEST(SharedMapping, IsNotFoundIfNoProcessListens) {
  v1::SharedMemoryOffer offer;
  offer.set_token(std::string(32, 't'));
  offer.set_socket("ballast-test-no-listener");
  EXPECT_TRUE(Refused(ConnectTo(offer), absl::StatusCode::kNotFound));
}

TEST(SharedMapping, RefusesOffersThatCannotBe) {
  v1::SharedMemoryOffer offer;
  offer.set_token(std::string(31, 't'));
  offer.set_socket("ballast-test-no-listener");
  EXPECT_TRUE(Refused(ConnectTo(offer), absl::StatusCode::kFailedPrecondition));
  offer.set_token(std::string(32, 't'));
  offer.set_socket("");
  EXPECT_TRUE(Refused(ConnectTo(offer), absl::StatusCode::kFailedPrecondition));
  offer.set_socket(std::string(108, 's'));
  EXPECT_TRUE(Refused(ConnectTo(offer), absl::StatusCode::kFailedPrecondition));
}

}  // namespace
}  // namespace ballast::client
