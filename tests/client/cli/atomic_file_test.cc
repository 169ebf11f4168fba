#include "client/cli/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/processes.h"

namespace ballast::client::cli {
namespace {

using testing::HasSubstr;

class WholeFileTest : public testing::Test {
 protected:
  WholeFileTest()
      : directory_(testing::TempDir() + "atomic_file_test." + std::to_string(getpid())) {
    std::filesystem::create_directories(directory_);
  }
  ~WholeFileTest() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  size_t Files() const {
    const std::filesystem::directory_iterator files(directory_);
    return static_cast<size_t>(std::distance(begin(files), end(files)));
  }

  const std::string directory_;
};

TEST_F(WholeFileTest, AppearsOnCommitInPlaceOfTheOldOne) {
  std::ofstream(Path("a")) << "old";
  auto file = WholeFile::Create(Path("a")).value();
  ASSERT_TRUE(file->Append("ne").ok());
  ASSERT_TRUE(file->Append("w").ok());
  EXPECT_EQ(ReadFile(Path("a")), "old");
  ASSERT_TRUE(file->Commit().ok());
  file.reset();
  EXPECT_EQ(ReadFile(Path("a")), "new");
  EXPECT_EQ(Files(), 1u);
}

TEST_F(WholeFileTest, LeavesNothingWithoutCommit) {
  WholeFile::Create(Path("a")).value()->Append("half").IgnoreError();
  EXPECT_EQ(Files(), 0u);
}

TEST_F(WholeFileTest, LeavesNothingWhenASignalEndsTheProcess) {
  auto file = WholeFile::Create(Path("a")).value();
  ASSERT_TRUE(file->Append("half").ok());
  EXPECT_EQ(Files(), 1u);
  RemoveUnfinishedFile();
  EXPECT_EQ(Files(), 0u);
  file.reset();
  // A file that is whole stays.
  file = WholeFile::Create(Path("a")).value();
  ASSERT_TRUE(file->Commit().ok());
  RemoveUnfinishedFile();
  EXPECT_EQ(Files(), 1u);
}

TEST_F(WholeFileTest, SaysInOneLineWhatIsWrong) {
  EXPECT_THAT(std::string(WholeFile::Create(Path("none/a")).status().message()),
              HasSubstr("make its directory first"));
  EXPECT_THAT(std::string(WholeFile::Create(directory_).status().message()),
              HasSubstr("not a regular file"));
}

TEST_F(WholeFileTest, AWriteThatFailsLeavesNothing) {
  // A limit on file sizes stands for the full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  {
    auto file = WholeFile::Create(Path("a")).value();
    EXPECT_THAT(std::string(file->Append(std::string(4096, 'x')).message()),
                HasSubstr("cannot write " + Path("a")));
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(Files(), 0u);
}

}  // namespace
}  // namespace ballast::client::cli
