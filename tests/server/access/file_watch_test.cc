#include "server/access/file_watch.h"

#include <gmock/gmock.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace ballast::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(FileWatch, TellsOfFilesThatAreWrittenReplacedAndRemoved) {
  const std::string file = absl::StrCat(testing::TempDir(), "file_watch_test.", getpid());
  std::ofstream(file) << "a";
  // The times of files are coarse: a change at once may have that of the file's making.
  std::filesystem::last_write_time(
      file, std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  std::atomic<int> changes = 0;
  const FileWatch watch({{"a file", {file}, [&] {
                            ++changes;
                            return "something";
                          }}});
  const auto await = [&](int wanted) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (changes < wanted && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return changes == wanted;
  };
  // Of the same size. One change and not two: the file is not made empty before.
  std::fstream(file, std::ios::in | std::ios::out) << "b";
  EXPECT_TRUE(await(1));
  std::filesystem::remove(file);
  EXPECT_TRUE(await(2));
  std::ofstream(file + ".new") << "c";
  std::filesystem::rename(file + ".new", file);
  EXPECT_TRUE(await(3));
  std::filesystem::remove(file);
}

// Files that a test looks at itself, and what the log says then.
class WatchedFilesTest : public testing::Test {
 protected:
  WatchedFilesTest() {
    Change();
    files_.emplace("the files", std::vector<std::string>{file_, ""}, [this] {
      ++attempts_;
      return found_;
    });
    auto logger = std::make_shared<spdlog::logger>(
        "test", std::make_shared<spdlog::sinks::ostream_sink_st>(log_));
    logger->set_pattern("%l: %v");
    spdlog::set_default_logger(std::move(logger));
  }
  ~WatchedFilesTest() override {
    spdlog::set_default_logger(before_);
    std::filesystem::remove(file_);
  }

  // To another size: the times of files are coarse.
  void Change() { std::ofstream(file_, std::ios::app) << "a"; }
  // Which of the next looks read the files.
  std::vector<int> ReadingLooks(int looks) {
    std::vector<int> reading;
    for (int look = 1; look <= looks; ++look) {
      const int before = attempts_;
      files_->Look();
      EXPECT_LE(attempts_, before + 1);
      if (attempts_ > before) reading.push_back(look);
    }
    return reading;
  }
  std::string Logged() {
    std::string lines = log_.str();
    log_.str("");
    return lines;
  }

  const std::string file_ = absl::StrCat(testing::TempDir(), "watched_files_test.", getpid());
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  std::ostringstream log_;
  absl::StatusOr<std::string> found_ = "two lines";
  int attempts_ = 0;
  std::optional<WatchedFiles> files_;
};

TEST_F(WatchedFilesTest, FailuresAreReadAgainWithGrowingPausesUntilOneSucceeds) {
  EXPECT_THAT(ReadingLooks(10), IsEmpty());
  found_ = absl::InvalidArgumentError("x.key is not the key of x.pem");
  Change();
  EXPECT_THAT(ReadingLooks(257), ElementsAre(2, 3, 5, 9, 17, 33, 65, 129, 193, 257));
  EXPECT_EQ(
      Logged(),
      "error: cannot read the files again, and the old stays in force: x.key is not the key of "
      "x.pem (tried again by itself)\n");
  found_ = "three lines";
  EXPECT_THAT(ReadingLooks(200), ElementsAre(64));
  EXPECT_EQ(Logged(), "info: read the files again: three lines\n");
}

TEST_F(WatchedFilesTest, AChangeIsReadSoonAlsoWithinAPause) {
  found_ = absl::InvalidArgumentError("half of it is there");
  Change();
  EXPECT_THAT(ReadingLooks(20), ElementsAre(2, 3, 5, 9, 17));
  Change();  // Still wrong: said once more, and the pauses begin again.
  EXPECT_THAT(ReadingLooks(6), ElementsAre(2, 3, 5));
  EXPECT_THAT(Logged(), testing::ContainsRegex("^error: [^\n]+\nerror: [^\n]+\n$"));
  found_ = "all of it";
  Change();
  EXPECT_THAT(ReadingLooks(100), ElementsAre(2));
  EXPECT_EQ(Logged(), "info: read the files again: all of it\n");
}

TEST_F(WatchedFilesTest, WhatChangesWhileItIsReadIsReadOnceMore) {
  files_.emplace("the files", std::vector<std::string>{file_}, [this] {
    if (++attempts_ == 1) Change();
    return found_;
  });
  Change();
  EXPECT_THAT(ReadingLooks(10), ElementsAre(2, 4));
}

TEST_F(WatchedFilesTest, WhatIsBeingWrittenIsReadWhenThatHasEnded) {
  for (int i = 0; i < 5; ++i) {
    Change();
    EXPECT_THAT(ReadingLooks(1), IsEmpty());
  }
  EXPECT_THAT(ReadingLooks(10), ElementsAre(1));
}

}  // namespace
}  // namespace ballast::server
