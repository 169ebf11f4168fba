#include "cpu_optimizer_service/host/state_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "tests/cpu_optimizer_service/host/directory_in_memory.h"
#include "tests/cpu_optimizer_service/host/keeper_for_two.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kUid(32, 'a');
constexpr auto kNow = ArenaFactory::Touch::kNow;
constexpr auto kLater = ArenaFactory::Touch::kLater;

absl::StatusOr<std::unique_ptr<StateDirectory>> Open(const std::string& path) {
  return StateDirectory::Open(
      {.path = path, .wait_seconds = 0, .last_checkpoint = [](const std::string& uid) {
         return "; the last checkpoint of " + uid + " is step 7";
       }});
}

std::string Read(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}
void Write(const std::string& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary) << bytes;
}

// By path.
std::map<std::string, std::string> AllOfIt(const std::string& directory) {
  std::map<std::string, std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    all[entry.path()] =
        entry.is_symlink() ? std::string(std::filesystem::read_symlink(entry)) : Read(entry.path());
  }
  return all;
}

// Why it cannot be opened; all that there was is there as it was.
absl::Status RefusalOf(const std::string& path) {
  const auto before = AllOfIt(path);
  const absl::Status refusal = Open(path).status();
  EXPECT_EQ(AllOfIt(path), before);
  return refusal;
}

// Of the mapping there, as /proc says them; "dd" is one that is left out of core dumps.
std::set<std::string> FlagsAt(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool is_it = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto at = reinterpret_cast<unsigned long>(address);
      is_it = begin <= at && at < end;
    } else if (is_it && absl::StartsWith(line, "VmFlags:")) {
      return absl::StrSplit(line, ' ');
    }
  }
  return {};
}

class StateDirectoryTest : public testing::Test {
 protected:
  // As a process leaves it that has made some memory and died: nothing was settled, so that nothing
  // is dropped with it.
  std::string Left() {
    const auto directory = Open(path_).value();
    NamedMemory memory(*directory);
    const auto arena = memory.Create(kUid + "/second versions", 10'000, kNow).value();
    std::memset(arena->data(), 7, 10'000);
    return path_ + "/" + kUid + ".second_versions.12288";
  }

  const DirectoryInMemory in_memory_;
  const std::string path_ = in_memory_.path();
  const std::string superblock_ = path_ + "/superblock";
};

TEST_F(StateDirectoryTest, IsFoundByTheNextProcessAsItWasLeft) {
  const std::string file = Left();
  struct stat facts = {};
  ASSERT_EQ(stat(path_.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
  ASSERT_EQ(stat(file.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  EXPECT_GE(facts.st_blocks * 512, facts.st_size) << "not all of it is there";
  const auto directory = Open(path_).value();
  NamedMemory memory(*directory);
  EXPECT_EQ(memory.LeftBytes(), 12'288);
  const auto arena = memory.Open(kUid + "/second versions").value();
  EXPECT_EQ(arena->data()[9'999], std::byte{7});
  EXPECT_EQ(arena->data()[10'000], std::byte{0});
}

TEST_F(StateDirectoryTest, LosesWhatIsDroppedOnceItIsSettled) {
  const std::string file = Left();
  const auto directory = Open(path_).value();
  NamedMemory memory(*directory);
  (void)memory.Open(kUid + "/second versions").value();
  EXPECT_TRUE(std::filesystem::exists(file));
  directory->Settle();
  EXPECT_FALSE(std::filesystem::exists(file));
  auto arena = memory.Create(kUid + "/record 1", 1, kNow).value();
  EXPECT_TRUE(std::filesystem::exists(path_ + "/" + kUid + ".record_1.4096"));
  arena = nullptr;
  EXPECT_EQ(AllOfIt(path_).size(), 1u);  // The superblock.
}

TEST_F(StateDirectoryTest, MakesAnewWhatWasDroppedBeforeItIsSettled) {
  Left();
  const auto directory = Open(path_).value();
  NamedMemory memory(*directory);
  (void)memory.Open(kUid + "/second versions").value();
  const auto arena = memory.Create(kUid + "/second versions", 10'000, kNow).value();
  EXPECT_EQ(arena->data()[0], std::byte{0});
  directory->Settle();
  EXPECT_EQ(AllOfIt(path_).size(), 2u);
}

TEST_F(StateDirectoryTest, IsClearedOfWhatWasBeingMade) {
  const std::string file = Left();
  Write(path_ + "/" + kUid + ".record_1.4096.new", "half");
  const auto directory = Open(path_).value();
  EXPECT_EQ(AllOfIt(path_).size(), 2u);
  EXPECT_THAT(directory->TakeKept(), testing::SizeIs(1));
}

TEST_F(StateDirectoryTest, IsRefusedWhereItIsNotInMemory) {
  // Nothing can be made in /proc, not even by root.
  for (const std::string path : {"/proc/ballast", "/proc/ballast/"}) {
    EXPECT_TRUE(Refused(Open(path), absl::StatusCode::kInvalidArgument));
  }
  EXPECT_TRUE(Refused(Open(in_memory_.outside() + "/a/b"), absl::StatusCode::kInvalidArgument));
}

TEST_F(StateDirectoryTest, IsRefusedWhereOthersReachIt) {
  Left();
  std::filesystem::create_directory_symlink(path_, in_memory_.outside() + "/link");
  for (const char* const end : {"", "/"}) {
    EXPECT_TRUE(Refused(RefusalOf(in_memory_.outside() + "/link" + end),
                        absl::StatusCode::kInvalidArgument));
  }
  chmod(path_.c_str(), 0750);
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kInvalidArgument));
  chmod(path_.c_str(), 0700);
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a directory to another user";
  ASSERT_EQ(chown(path_.c_str(), 12345, 0), 0);
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kInvalidArgument));
  ASSERT_EQ(chown(path_.c_str(), 0, 0), 0);
  ASSERT_EQ(chown((path_ + "/" + kUid + ".second_versions.12288").c_str(), 12345, 0), 0);
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kDataLoss));
}

TEST_F(StateDirectoryTest, IsRefusedWhereAFileIsNotAsItWas) {
  const std::string file = Left();
  const std::string bytes = Read(file);
  std::filesystem::resize_file(file, 8'192);
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kDataLoss));
  std::filesystem::rename(file, in_memory_.outside() + "/elsewhere");
  std::filesystem::create_symlink(in_memory_.outside() + "/elsewhere", file);
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kDataLoss));
  std::filesystem::remove(file);
  Write(file, bytes);
  EXPECT_TRUE(Open(path_).ok());
  Write(path_ + "/notes", "mine");
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kDataLoss));
}

TEST_F(StateDirectoryTest, IsRefusedWhereItsSuperblockIsNotAsItWas) {
  Left();
  const std::string bytes = Read(superblock_);
  for (size_t bit = 0; bit < 8 * 80; ++bit) {  // What follows is which process has it.
    std::string flipped = bytes;
    flipped[bit / 8] ^= static_cast<char>(1 << bit % 8);
    Write(superblock_, flipped);
    EXPECT_EQ(RefusalOf(path_).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kDataLoss));
  const auto write_whole = [&](std::string changed) {
    const uint64_t checksum = ChecksumOf(absl::string_view(changed).substr(0, 72));
    std::memcpy(changed.data() + 72, &checksum, sizeof(checksum));
    Write(superblock_, changed);
  };
  std::string newer = bytes;
  newer[16] = 2;
  write_whole(newer);
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kFailedPrecondition));
  std::string other_boot = bytes;
  other_boot[24] = other_boot[24] == '0' ? '1' : '0';  // Still a digit of it.
  write_whole(other_boot);
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kFailedPrecondition));
  Write(superblock_, bytes.substr(0, 50));
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kDataLoss));
  std::filesystem::remove(superblock_);
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kDataLoss));
  Write(superblock_, bytes);
  EXPECT_TRUE(Open(path_).ok());
}

TEST_F(StateDirectoryTest, IsRefusedWhileAnotherProcessHasIt) {
  auto first = Open(path_).value();
  EXPECT_TRUE(Refused(RefusalOf(path_), absl::StatusCode::kUnavailable));
  // Its end is awaited.
  std::thread end;
  std::string said;
  const auto second = StateDirectory::Open({.path = path_, .say = [&](const std::string& line) {
                                              said = line;
                                              end = std::thread([&] { first = nullptr; });
                                            }});
  EXPECT_TRUE(second.ok()) << second.status();
  EXPECT_THAT(said, HasSubstr("waiting 30 s"));
  end.join();
}

TEST_F(StateDirectoryTest, LeavesTheLockAndSealedMemoryToTheParent) {
  KeeperForTwo parent;  // As ballastd's parent.
  {
    const auto directory = StateDirectory::Open({.path = path_, .others = &parent}).value();
    NamedMemory memory(*directory);
    EXPECT_FALSE(memory.KeepsShared());
    const auto shared = memory.CreateShared(kUid + "/rank 0 1", 100).value();
    EXPECT_EQ(fcntl(shared->file_descriptor(), F_GET_SEALS),
              F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    EXPECT_THAT(parent.kept(), testing::SizeIs(2));
    EXPECT_EQ(AllOfIt(path_).size(), 1u);
  }
  EXPECT_THAT(parent.kept(), testing::SizeIs(1));
  // The service's process is gone, and its parent starts another.
  EXPECT_EQ(Open(path_).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(StateDirectory::Open({.path = path_, .others = &parent, .wait_seconds = 0}).ok());
}

TEST_F(StateDirectoryTest, HasNoRoomWhereItsFileSystemIsFull) {
  if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 ||
      mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("none", in_memory_.outside().c_str(), "tmpfs", 0, "size=256k") != 0) {
    GTEST_SKIP() << "no tmpfs can be mounted here: " << std::strerror(errno);
  }
  {
    const auto directory = Open(path_).value();
    directory->Settle();
    NamedMemory memory(*directory);
    for (const auto touch : {kNow, kLater}) {
      EXPECT_TRUE(Refused(memory.Create(kUid + "/state", 1 << 20, touch),
                          absl::StatusCode::kResourceExhausted));
      EXPECT_EQ(AllOfIt(path_).size(), 1u);  // Nothing is left of it.
    }
    EXPECT_TRUE(memory.Create(kUid + "/state", 64 << 10, kLater).ok());
    EXPECT_TRUE(Refused(memory.Admit(1 << 20, "job gpt"), absl::StatusCode::kResourceExhausted));
    EXPECT_TRUE(memory.Admit(100'000, "job gpt").ok());
  }
  umount(in_memory_.outside().c_str());
}

TEST_F(StateDirectoryTest, AdmitsNoMoreThanTheMachineHas) {
  const auto directory = Open(path_).value();
  NamedMemory memory(*directory, [] { return 50'000; });
  EXPECT_TRUE(memory.Admit(50'000, "job gpt").ok());
  EXPECT_TRUE(Refused(memory.Admit(50'001, "job gpt"), absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(memory.CreateShared(kUid + "/rank 0 1", 50'001).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// As a directory on hugetlbfs, whose pages are of a pool of their own.
TEST(NamedMemoryTest, AdmitsWhatAPoolApartHasLeft) {
  class Pool final : public KeeperForTwo {
    std::optional<Room> room() const override {
      return Room{.bytes = 50'000, .is_apart = true, .where = "/huge (hugetlbfs)"};
    }
  } pool;
  NamedMemory memory(pool, [] { return 10'000; });
  EXPECT_TRUE(memory.Admit(50'000, "job gpt").ok());
  EXPECT_TRUE(Refused(memory.Admit(50'001, "job gpt"), absl::StatusCode::kResourceExhausted));
  // Sealed memory is the machine's.
  EXPECT_EQ(memory.CreateShared(kUid + "/rank 0 1", 10'001).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// A core dump of a service would be all of its state.
TEST_F(StateDirectoryTest, IsLeftOutOfCoreDumpsWithAllNamedMemory) {
  const auto directory = Open(path_).value();
  KeeperForTwo parent;
  for (FileKeeper* keeper : std::vector<FileKeeper*>{directory.get(), &parent}) {
    NamedMemory memory(*keeper);
    const auto state = memory.Create(kUid + "/state", 4 << 20, kNow).value();
    const auto shared = memory.CreateShared(kUid + "/rank 0 1", 10'000).value();
    for (NamedArena* arena : {state.get(), shared.get()}) {
      for (const std::byte* at : {arena->data(), arena->data() + arena->size_bytes() - 1}) {
        EXPECT_THAT(FlagsAt(at), testing::Contains("dd")) << arena->name();
      }
    }
    const std::string outside(5 << 20, 'x');
    EXPECT_THAT(FlagsAt(outside.data() + outside.size() / 2), Not(testing::Contains("dd")));
  }
}

TEST_F(StateDirectoryTest, ShowsEveryFlippedBitOfARecord) {
  const std::string contents = "what a job is";
  {
    const auto directory = Open(path_).value();
    NamedMemory memory(*directory);
    NamedArenas arenas(memory, kUid, "");
    KeptRecord record(arenas, "record", 64);
    ASSERT_TRUE(record.Store("what it was before").ok());
    ASSERT_TRUE(record.Store(contents).ok());
  }
  const std::string file = path_ + "/" + kUid + ".record_1.4096";
  const std::string bytes = Read(file);
  int seen = 0;
  for (size_t bit = 0; bit < 8 * 512; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] ^= static_cast<char>(1 << bit % 8);
    Write(file, flipped);
    const auto directory = Open(path_).value();
    NamedMemory memory(*directory);
    NamedArenas arenas(memory, kUid, "");
    const auto found = KeptRecord(arenas, "record", 64).TakeOver();
    if (!found.ok() && seen++ == 0) {
      EXPECT_TRUE(Refused(found, absl::StatusCode::kDataLoss));
    }
    // What is not read may change: it is never another one, or none.
    EXPECT_TRUE(found.ok() ? *found == contents : absl::IsDataLoss(found.status()))
        << "bit " << bit << ": " << found.status();
  }
  // Which half it is, the capacity of one, its length, its checksum, all of it.
  EXPECT_EQ(seen, 8 * (8 + 8 + 8 + 8 + static_cast<int>(contents.size())));
}

}  // namespace
}  // namespace ballast
