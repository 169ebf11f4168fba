#include "cpu_optimizer_service/host/file_system.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Where tests lie, on a disk as a rule, and in memory, which take large writes in different ways.
class FileSystemTest : public testing::TestWithParam<std::string> {
 protected:
  ~FileSystemTest() override { std::filesystem::remove(path_); }

  static std::string Contents(size_t bytes) {
    std::string contents(bytes, 0);
    for (size_t i = 0; i < bytes; ++i) contents[i] = static_cast<char>(i * 7 + i / 4096 + i / kMiB);
    return contents;
  }
  static absl::Span<const std::byte> Bytes(absl::string_view text) {
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size());
  }
  std::string Read() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const std::string folder_ = GetParam().empty() ? testing::TempDir() : GetParam();
  const std::string path_ = absl::StrCat(folder_, "/file-system-test-", getpid());
};

TEST_P(FileSystemTest, AFileHasWhatWasAppendedInPiecesOfAnySize) {
  for (const std::vector<size_t>& sizes :
       std::vector<std::vector<size_t>>{{},
                                        {1},
                                        {8, 200, kMiB},
                                        {kMiB, kMiB},
                                        {3 * kMiB + 5, 0, 4096, 2 * kMiB - 5 - 4096},
                                        std::vector<size_t>(700, 4099)}) {
    std::string all;
    {
      const auto file = PosixFileSystem().Create(path_);
      ASSERT_TRUE(file.ok()) << file.status();
      for (const size_t size : sizes) {
        const std::string piece = Contents(size);
        ASSERT_TRUE((*file)->Append(Bytes(piece)).ok());
        all += piece;
      }
      ASSERT_TRUE((*file)->Close().ok());
    }
    EXPECT_TRUE(Read() == all) << sizes.size() << " pieces, " << all.size() << " bytes";
    std::filesystem::remove(path_);
  }
}

// As a disk ends that is full: in the middle of a large write.
TEST_P(FileSystemTest, AFileThatMayNotGrowSaysSoAndHasWhatFitted) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit = {.rlim_cur = kMiB + 12345, .rlim_max = before.rlim_max};
  const auto file = PosixFileSystem().Create(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  const std::string contents = Contents(3 * kMiB);
  setrlimit(RLIMIT_FSIZE, &limit);
  absl::Status status;
  for (size_t at = 0; at < contents.size() && status.ok(); at += 1000) {
    status = (*file)->Append(Bytes(contents).subspan(at, 1000));
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnknown));
  EXPECT_TRUE(Read() == contents.substr(0, kMiB + 12345));
}

// Each of them is a name in another one, which is lost with the host where that is not flushed.
TEST_P(FileSystemTest, ADirectoryIsMadeWithItsParentsAndEachIsFlushed) {
  std::filesystem::create_directory(path_);
  // To flush a directory it has to be opened, and nothing else here opens one.
  const FileDescriptor events(inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  ASSERT_GE(inotify_add_watch(events.number(), path_.c_str(), IN_OPEN), 0);
  ASSERT_TRUE(PosixFileSystem().CreateDirectory(path_ + "/a/b/c").ok());
  EXPECT_TRUE(std::filesystem::is_directory(path_ + "/a/b/c"));
  const auto opened = [&] {
    alignas(inotify_event) char event[4096];
    return read(events.number(), event, sizeof(event)) > 0;
  };
  EXPECT_TRUE(opened()) << "the directory that a was made in has not been flushed";
  ASSERT_GE(inotify_add_watch(events.number(), (path_ + "/a").c_str(), IN_OPEN), 0);
  ASSERT_TRUE(PosixFileSystem().CreateDirectory(path_ + "/a/b/c").ok());
  EXPECT_FALSE(opened()) << "nothing has been made";
  std::filesystem::remove_all(path_);
}

TEST_P(FileSystemTest, RemovingATreeLeavesWhatItsLinksPointTo) {
  FileSystem& files = PosixFileSystem();
  std::filesystem::create_directories(path_ + "/deep/deeper");
  std::filesystem::create_directory(path_ + "/other");
  for (const char* file : {"/deep/b", "/deep/deeper/c", "/other/d"}) {
    std::ofstream(path_ + file) << file;
  }
  std::filesystem::create_directory_symlink(path_ + "/other", path_ + "/deep/link");
  EXPECT_TRUE(files.RemoveAll(path_ + "/deep").ok());
  EXPECT_EQ(files.List(path_).value(), std::vector<std::string>{"other"});
  EXPECT_TRUE(std::filesystem::exists(path_ + "/other/d"));
  for (int time = 0; time < 2; ++time) EXPECT_TRUE(files.RemoveAll(path_).ok());
  EXPECT_EQ(files.List(path_).status().code(), absl::StatusCode::kNotFound);
}

INSTANTIATE_TEST_SUITE_P(OnADiskAndInMemory, FileSystemTest, testing::Values("", "/dev/shm"));

}  // namespace
}  // namespace ballast
