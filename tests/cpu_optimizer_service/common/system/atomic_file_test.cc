#include "cpu_optimizer_service/common/system/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/messages.h"

namespace ballast {
namespace {

// A limit on file sizes stands for the full disk.
class SmallFiles {
 public:
  explicit SmallFiles(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    rlimit small = before_;
    small.rlim_cur = bytes;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  ~SmallFiles() { EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0); }

 private:
  rlimit before_;
};

class AtomicFileTest : public testing::Test {
 protected:
  AtomicFileTest()
      : directory_(testing::TempDir() + "atomic_file_test." + std::to_string(getpid())) {
    std::filesystem::create_directories(directory_);
  }
  ~AtomicFileTest() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  size_t Files() const {
    const std::filesystem::directory_iterator files(directory_);
    return static_cast<size_t>(std::distance(begin(files), end(files)));
  }

  const std::string directory_;
};

TEST_F(AtomicFileTest, AppearsOnCommitInPlaceOfTheOldOne) {
  std::ofstream(Path("a")) << "old";
  auto file = AtomicFile::Create(Path("a")).value();
  ASSERT_TRUE(file->Append("ne").ok());
  ASSERT_TRUE(file->Append("w").ok());
  EXPECT_EQ(Read("a"), "old");
  ASSERT_TRUE(file->Commit().ok());
  file.reset();
  EXPECT_EQ(Read("a"), "new");
  EXPECT_EQ(Files(), 1u);
}

TEST_F(AtomicFileTest, LeavesNothingWithoutCommit) {
  AtomicFile::Create(Path("a")).value()->Append("half").IgnoreError();
  EXPECT_EQ(Files(), 0u);
}

TEST_F(AtomicFileTest, LeavesNothingWhenASignalEndsTheProcess) {
  auto file = AtomicFile::Create(Path("a"), {.remove_on_signal = true}).value();
  ASSERT_TRUE(file->Append("half").ok());
  EXPECT_EQ(Files(), 1u);
  RemoveUnfinishedFile();
  EXPECT_EQ(Files(), 0u);
  file.reset();
  // A committed file stays.
  file = AtomicFile::Create(Path("a"), {.remove_on_signal = true}).value();
  ASSERT_TRUE(file->Commit().ok());
  RemoveUnfinishedFile();
  EXPECT_EQ(Files(), 1u);
}

TEST_F(AtomicFileTest, TakesThePlaceOfWhatAKilledProcessLeft) {
  std::ofstream(Path("a.partial")) << "half of an earlier one";
  auto file = AtomicFile::Create(Path("a")).value();
  ASSERT_TRUE(file->Append("new").ok());
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(Read("a"), "new");
  EXPECT_EQ(Files(), 1u);
}

TEST_F(AtomicFileTest, DoesNotWriteThroughALink) {
  std::ofstream(Path("of another user")) << "theirs";
  std::filesystem::create_symlink(Path("of another user"), Path("a.partial"));
  auto file = AtomicFile::Create(Path("a")).value();
  ASSERT_TRUE(file->Append("new").ok());
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(Read("of another user"), "theirs");
  EXPECT_EQ(Read("a"), "new");
}

TEST_F(AtomicFileTest, SaysInOneLineWhatIsWrong) {
  EXPECT_TRUE(Refused(AtomicFile::Create(Path("none/a")), absl::StatusCode::kNotFound));
  EXPECT_TRUE(Refused(AtomicFile::Create(directory_), absl::StatusCode::kInvalidArgument));
}

TEST_F(AtomicFileTest, AFullDiskIsResourceExhausted) {
  EXPECT_TRUE(Refused(FileError(ENOSPC, "write", "a"), absl::StatusCode::kResourceExhausted));
}

TEST_F(AtomicFileTest, AWriteThatFailsLeavesNothing) {
  {
    const SmallFiles limit(1000);
    auto file = AtomicFile::Create(Path("a")).value();
    EXPECT_TRUE(Refused(file->Append(std::string(4096, 'x')), absl::StatusCode::kUnknown));
  }
  EXPECT_EQ(Files(), 0u);
}

TEST_F(AtomicFileTest, SeveralFilesAppearTogether) {
  ASSERT_TRUE(WriteAtomically({{Path("first"), "1"}, {Path("second"), "2"}}).ok());
  EXPECT_EQ(Read("first"), "1");
  EXPECT_EQ(Read("second"), "2");
  EXPECT_EQ(Files(), 2u);
}

TEST_F(AtomicFileTest, OfSeveralFilesNoneAppearsWhenAWriteFails) {
  const SmallFiles limit(1000);
  EXPECT_FALSE(
      WriteAtomically({{Path("first"), "1"}, {Path("second"), std::string(4096, 'x')}}).ok());
  EXPECT_EQ(Files(), 0u);
}

TEST_F(AtomicFileTest, OfSeveralFilesNoneAppearsWhenOneCannotTakeItsPlace) {
  std::filesystem::create_directories(Path("second/is a folder"));
  EXPECT_FALSE(WriteAtomically({{Path("first"), "1"}, {Path("second"), "2"}}).ok());
  EXPECT_EQ(Files(), 1u);
}

}  // namespace
}  // namespace ballast
