#include "gpu_worker/run/loss_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "tests/gpu_worker/temp_path.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr char kHeader[] =
    "step,loss,norm,clip,tokens_per_second,seconds,compute,reduce,send,update,receive\n";

StepReport ReportOf(uint64_t step) {
  StepReport report;
  report.step = step;
  report.loss = 5 - 0.25 * static_cast<double>(step);
  report.norm = 1.5;
  report.clip_coefficient = 0.5;
  report.applied = true;
  report.seconds = 0.25;
  report.tokens_per_second = 4096;
  report.times = {.compute = 0.2, .reduce = 0.02, .send = 0.01, .update = 0.015, .receive = 0.005};
  return report;
}

// A run's directory, and what starts of its worker do there.
class Directory {
 public:
  Directory() { std::filesystem::create_directories(path_.str()); }

  const std::string& path() const { return path_.str(); }
  std::string Csv() const {
    std::ifstream file(path() + "/losses.csv", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  void WriteCsv(const std::string& contents) {
    std::ofstream(path() + "/losses.csv", std::ios::binary) << contents;
  }
  std::unique_ptr<LossLog> Open(uint64_t committed) {
    return LossLog::Open(path(), committed).value();
  }
  // Does whole steps, as a worker that is killed after the last.
  void DoSteps(uint64_t first, uint64_t last) {
    const std::unique_ptr<LossLog> log = Open(first - 1);
    for (uint64_t step = first; step <= last; ++step) {
      ASSERT_TRUE(log->Append(ReportOf(step)).ok());
    }
  }
  std::string Lines(std::initializer_list<uint64_t> steps) const {
    std::vector<StepReport> reports;
    for (const uint64_t step : steps) reports.push_back(ReportOf(step));
    return LossesCsv(reports);
  }

 private:
  const TempPath path_{"loss_log"};
};

std::vector<uint64_t> StepsOf(const LossLog& log) {
  std::vector<uint64_t> steps;
  for (const StepReport& report : log.reports()) steps.push_back(report.step);
  return steps;
}

TEST(LossesCsv, IsALineAStep) {
  EXPECT_EQ(LossesCsv({ReportOf(4)}),
            std::string(kHeader) + "4,4,1.5,0.5,4096,0.25,0.2,0.02,0.01,0.015,0.005\n");
}

TEST(LossesCsv, ANanHasNoSign) {
  StepReport report = ReportOf(4);
  report.loss = report.norm = -std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(LossesCsv({report}).find("-nan"), std::string::npos);
}

TEST(LossesCsv, IsReadUpToTheFirstLineThatIsNotWhole) {
  const std::string csv = LossesCsv({ReportOf(4), ReportOf(5)});
  const size_t first_end = csv.find('\n', sizeof(kHeader)) + 1;
  for (size_t size = 0; size <= csv.size(); ++size) {
    const size_t whole = ParseLossesCsv(csv.substr(0, size)).size();
    EXPECT_EQ(whole, size == csv.size() ? 2 : size >= first_end ? 1 : 0) << size << " bytes";
  }
  EXPECT_EQ(LossesCsv(ParseLossesCsv(csv)), csv);
  EXPECT_EQ(ParseLossesCsv(csv + "5,1,1,1,1,1,1,1,1,1,1\n").size(), 2);  // Doubled.
  EXPECT_EQ(ParseLossesCsv(csv + "six,1,1,1,1,1,1,1,1,1,1\n").size(), 2);
  EXPECT_THAT(ParseLossesCsv("another file\n1,2\n"), IsEmpty());
}

TEST(LossLog, GoesOnAfterTheLastLineOfAnEarlierStart) {
  Directory directory;
  directory.DoSteps(1, 3);
  directory.DoSteps(4, 5);
  EXPECT_EQ(directory.Csv(), directory.Lines({1, 2, 3, 4, 5}));
}

TEST(LossLog, LinesAreInTheFileAtOnce) {
  Directory directory;
  const std::unique_ptr<LossLog> log = directory.Open(0);
  EXPECT_EQ(directory.Csv(), kHeader);
  ASSERT_TRUE(log->Append(ReportOf(1)).ok());
  EXPECT_EQ(directory.Csv(), directory.Lines({1}));
}

TEST(LossLog, ALineOfAStepThatIsNotCommittedGoes) {
  Directory directory;
  directory.DoSteps(1, 5);
  EXPECT_THAT(StepsOf(*directory.Open(3)), ElementsAre(1, 2, 3));
  EXPECT_EQ(directory.Csv(), directory.Lines({1, 2, 3}));
}

TEST(LossLog, ATornLineGoes) {
  Directory directory;
  directory.Open(0);
  const std::string whole = directory.Lines({1, 2, 3});
  directory.WriteCsv(whole.substr(0, whole.size() - 5));
  EXPECT_THAT(StepsOf(*directory.Open(2)), ElementsAre(1, 2));
  EXPECT_EQ(directory.Csv(), directory.Lines({1, 2}));
}

// Killed after the service committed step 4, before its line was written.
TEST(LossLog, ACommittedStepMayHaveNoLine) {
  Directory directory;
  directory.DoSteps(1, 3);
  directory.DoSteps(5, 6);
  EXPECT_EQ(directory.Csv(), directory.Lines({1, 2, 3, 5, 6}));
}

TEST(LossLog, AFileOfAnotherRunGoes) {
  Directory directory;
  directory.DoSteps(1, 5);
  EXPECT_THAT(StepsOf(*directory.Open(0)), IsEmpty());
  EXPECT_EQ(directory.Csv(), kHeader);
  directory.WriteCsv("a user's file\n");
  EXPECT_THAT(StepsOf(*directory.Open(7)), IsEmpty());
}

TEST(LossLog, StepsThatAreDoneOnceMoreReplaceTheirLines) {
  Directory directory;
  directory.DoSteps(1, 5);
  const std::unique_ptr<LossLog> log = directory.Open(5);
  ASSERT_TRUE(log->Append(ReportOf(4)).ok());
  ASSERT_TRUE(log->Append(ReportOf(5)).ok());
  EXPECT_EQ(directory.Csv(), directory.Lines({1, 2, 3, 4, 5}));
}

}  // namespace
}  // namespace ballast::worker
