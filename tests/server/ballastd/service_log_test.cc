#include "server/ballastd/service_log.h"

#include <gmock/gmock.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "server/ballastd/life_log.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// Puts the logger back that other tests of this process have.
class ServiceLogTest : public testing::Test {
 protected:
  ~ServiceLogTest() override { spdlog::set_default_logger(before_); }

  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(ServiceLogTest, AnEntryIsOnePrintableLineOfABoundedSize) {
  const auto last_lines = StartLog("info");
  spdlog::warn("job {} is new", "a\n[ballastd] [info] audit: user:0 from nowhere\x1b[2K");
  spdlog::warn("job {} is new", std::string(size_t{1} << 20, 'n'));
  EXPECT_THAT(
      last_lines(),
      ElementsAre(AllOf(HasSubstr("[warning] "),
                        EndsWith("] job a\\x0a[ballastd] [info] audit: user:0 from nowhere\\x1b[2K "
                                 "is new\n")),
                  AllOf(SizeIs(testing::Lt(5000)), EndsWith("nnn...\n"))));
}

TEST_F(ServiceLogTest, HasTheLevelThatIsAskedFor) {
  const auto last_lines = StartLog("warning");
  spdlog::info("info");
  EXPECT_THAT(last_lines(), SizeIs(0));
}

// A logger's lines, as standard error would have them.
std::string StderrOf(const std::function<void()>& log) {
  testing::internal::CaptureStderr();
  log();
  spdlog::default_logger()->flush();
  std::fflush(stderr);
  return testing::internal::GetCapturedStderr();
}

TEST_F(ServiceLogTest, InJsonALineIsAnObjectWithTheJob) {
  SetLogFormat(LogFormat::kJson);
  (void)StartLog("info");
  const std::string said = StderrOf([] {
    spdlog::warn("job gpt-2.1: says \"no\"\n");
    spdlog::info("job could not be saved: why");
    LogLine(kErrorPriority, "the \"holder\" %d\n", 7);
  });
  SetLogFormat(LogFormat::kText);
  std::vector<nlohmann::json> lines;
  for (const absl::string_view line : absl::StrSplit(said, '\n', absl::SkipEmpty())) {
    lines.push_back(nlohmann::json::parse(line));
    const std::string time = lines.back()["time"];
    absl::Time parsed;
    EXPECT_TRUE(absl::ParseTime(absl::RFC3339_full, time, &parsed, nullptr)) << time;
  }
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0]["level"], "warning");
  EXPECT_EQ(lines[0]["job"], "gpt-2.1");
  EXPECT_EQ(lines[0]["message"], "job gpt-2.1: says \"no\"\\x0a");
  EXPECT_FALSE(lines[1].contains("job"));
  EXPECT_EQ(lines[2]["level"], "error");
  EXPECT_EQ(lines[2]["message"], "the \"holder\" 7?");
}

TEST_F(ServiceLogTest, HasPrioritiesWhereStandardErrorIsTheJournal) {
  const auto log = [] {
    (void)StartLog("info");
    spdlog::warn("one");
    spdlog::error("two");
    LogLine(kInfoPriority, "three");
  };
  const std::string plain = StderrOf([&] {
    setenv("JOURNAL_STREAM", "1:1", 1);  // Inherited; this is another file.
    log();
  });
  EXPECT_THAT(plain, Not(HasSubstr("<")));
  const std::string journal = StderrOf([&] {
    struct stat there = {};
    ASSERT_EQ(fstat(STDERR_FILENO, &there), 0);
    setenv("JOURNAL_STREAM", absl::StrCat(there.st_dev, ":", there.st_ino).c_str(), 1);
    log();
  });
  unsetenv("JOURNAL_STREAM");
  EXPECT_EQ(journal, "<4>[warning] one\n<3>[error] two\n<6>ballastd: three\n");
}

TEST(LifeLog, ARankThatComesAndGoesDoesNotFillTheLog) {
  std::vector<std::string> lines;
  LifeLog log([&](const std::string& line) { lines.push_back(line); });
  const LifeLog::Clock::time_point start = LifeLog::Clock::now();
  for (int i = 0; i < 1000; ++i) {
    log.Tell({.job = "gpt", .rank = 3, .text = absl::StrCat("comes ", i)}, start);
  }
  // What happens to others is told.
  log.Tell({.job = "gpt", .rank = 4, .text = "comes"}, start);
  log.Tell({.job = "gpt", .text = "saved"}, start);
  ASSERT_EQ(lines.size(), size_t{LifeLog::kMostLines} + 2);
  EXPECT_EQ(lines[0], "job gpt: comes 0");
  lines.clear();
  log.Look({}, start + LifeLog::kWindow);
  // Where it is now is among what is told.
  EXPECT_THAT(lines, ElementsAre(HasSubstr("job gpt: comes 999 (and 991 lines like it")));
  log.Tell({.job = "gpt", .rank = 3, .text = "is gone"}, start + LifeLog::kWindow);
  EXPECT_EQ(lines.back(), "job gpt: is gone");
}

TEST(LifeLog, LongWorkHasALineNowAndThen) {
  std::vector<std::string> lines;
  LifeLog log([&](const std::string& line) { lines.push_back(line); });
  const auto look = [&](double seconds) {
    log.Look({{.number = 1, .job = "gpt", .total_bytes = 2, .seconds = seconds}});
  };
  for (int second = 0; second < 60; ++second) look(second);
  EXPECT_EQ(lines.size(), 11u);
  EXPECT_EQ(lines[0], "job gpt: making its memory: 0 of 2 B");
  lines.clear();
  for (int second = 60; second < 3600; ++second) look(second);
  EXPECT_LT(lines.size(), 60u);
}

}  // namespace
}  // namespace ballast::server
