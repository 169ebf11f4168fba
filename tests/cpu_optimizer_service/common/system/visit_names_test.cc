#include "cpu_optimizer_service/common/system/visit_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <vector>

#include "cpu_optimizer_service/host/file_system.h"
#include "tests/support/failing_memory.h"

namespace ballast {
namespace {

using ::testing::UnorderedElementsAre;

class VisitNamesTest : public testing::Test {
 protected:
  VisitNamesTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ + "/deep/deeper");
    std::filesystem::create_directory(folder_ + "/other");
    for (const char* file : {"/a", "/deep/b", "/deep/deeper/c", "/other/d"}) {
      std::ofstream(folder_ + file) << file;
    }
    std::filesystem::create_directory_symlink(folder_ + "/other", folder_ + "/deep/link");
  }
  ~VisitNamesTest() override { std::filesystem::remove_all(folder_); }

  const std::string folder_ = testing::TempDir() + "visit_names_test";
  FileSystem& files_ = PosixFileSystem();
};

TEST_F(VisitNamesTest, VisitsEachNameOfADirectoryOrOfOneThatIsOpen) {
  std::vector<std::string> names;
  const auto add = [&](const char* name, int) { names.emplace_back(name); };
  EXPECT_EQ(VisitNames(AT_FDCWD, folder_.c_str(), add), 0);
  EXPECT_THAT(names, UnorderedElementsAre("a", "deep", "other"));
  names.clear();
  EXPECT_EQ(VisitNames(AT_FDCWD, folder_.c_str(),
                       [&](const char* name, int number) {
                         if (std::string(name) == "deep") {
                           EXPECT_EQ(VisitNames(number, name, add), 0);
                         }
                       }),
            0);
  EXPECT_THAT(names, UnorderedElementsAre("b", "deeper", "link"));
}

TEST_F(VisitNamesTest, SaysWhyItCannot) {
  const auto none = [](const char*, int) { FAIL(); };
  EXPECT_EQ(VisitNames(AT_FDCWD, (folder_ + "/no").c_str(), none), ENOENT);
  EXPECT_EQ(VisitNames(AT_FDCWD, (folder_ + "/a").c_str(), none), ENOTDIR);
  EXPECT_EQ(VisitNames(AT_FDCWD, (folder_ + "/deep/link").c_str(), none, O_NOFOLLOW), ENOTDIR);
}

TEST_F(VisitNamesTest, RemovingATreeLeavesWhatItsLinksPointTo) {
  EXPECT_TRUE(files_.RemoveAll(folder_ + "/deep").ok());
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/deep"));
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/other/d"));
  EXPECT_TRUE(files_.RemoveAll(folder_ + "/other/d").ok());
  EXPECT_TRUE(files_.RemoveAll(folder_ + "/other/d").ok());  // There is nothing to remove.
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/other/d"));
}

// Without memory the call ends, and not the process.
TEST_F(VisitNamesTest, EveryAllocationOfAListingAndOfARemovalMayFail) {
  const std::string name = folder_ + "/deep";
  std::string listed;
  for (int64_t index = 0; listed.empty(); ++index) {
    ASSERT_LT(index, 1000);
    left_until_failure = index;
    try {
      const auto names = files_.List(name);
      if (left_until_failure.exchange(-1) >= 0) listed = names.value().front();
    } catch (const std::bad_alloc&) {
    }
    left_until_failure = -1;
  }
  for (int64_t index = 0; std::filesystem::exists(name); ++index) {
    ASSERT_LT(index, 1000);
    left_until_failure = index;
    try {
      files_.RemoveAll(name).IgnoreError();
    } catch (const std::bad_alloc&) {
    }
    left_until_failure = -1;
  }
}

}  // namespace
}  // namespace ballast
