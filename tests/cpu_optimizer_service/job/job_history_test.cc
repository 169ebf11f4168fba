// The history of a job: what it keeps, what it thins, and that it moves nothing of the job.
#include "cpu_optimizer_service/common/history/job_history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast::job_history_test {
namespace {

constexpr uint64_t kWhole = 1024;  // The last steps, of which each is an entry.
constexpr double kInfinity = std::numeric_limits<double>::infinity();

JobSpec TwoGroups() { return MakeJobSpec({.group_sizes = {{1000, 24}, {700}}, .world_size = 2}); }

StepRecord Record(uint64_t step, double norm = 1) {
  StepRecord record;
  record.outcome.step = step;
  record.outcome.decision.apply = std::isfinite(norm);
  record.outcome.decision.norm = norm;
  if (!record.outcome.decision.apply) record.outcome.skip_reason = "step " + std::to_string(step);
  return record;
}

HistoryCell CellOf(const HistoryView& view, size_t entry, const std::string& name,
                   HistorySource source = HistorySource::kService) {
  for (size_t column = 0; column < view.columns.size(); ++column) {
    if (view.columns[column].name == name && view.columns[column].source == source) {
      return view.entries[entry].cell(column);
    }
  }
  return {};
}
HistoryCell NumberOf(const HistoryView& view, size_t entry, const std::string& name) {
  return CellOf(view, entry, name, HistorySource::kTrainer);
}

// Steps follow on each other, whatever the entries are.
void ExpectTiled(const HistoryView& view, uint64_t first, uint64_t last) {
  ASSERT_FALSE(view.entries.empty());
  EXPECT_EQ(view.entries.front().first_step, first);
  EXPECT_EQ(view.entries.back().last_step, last);
  for (size_t i = 1; i < view.entries.size(); ++i) {
    ASSERT_EQ(view.entries[i].first_step, view.entries[i - 1].last_step + 1) << i;
  }
}

TEST(JobHistory, KeepsTheLastSteps) {
  JobHistory history(TwoGroups());
  for (uint64_t step = 1; step <= kWhole; ++step) history.Add(Record(step, step), {});
  const HistoryView view = history.Read({});
  ASSERT_EQ(view.entries.size(), kWhole);
  ExpectTiled(view, 1, kWhole);
  EXPECT_EQ(CellOf(view, 41, "norm").mean, 42);
}

TEST(JobHistory, ThinsOlderStepsAndLosesNoSpike) {
  JobHistory history(TwoGroups());
  constexpr uint64_t kSteps = 50'000;
  constexpr uint64_t kSpike = 12'345;
  constexpr uint64_t kSkip = 30'123;
  for (uint64_t step = 1; step <= kSteps; ++step) {
    history.Add(Record(step, step == kSpike ? 900 : step == kSkip ? kInfinity : 1), {});
  }
  const HistoryView view = history.Read({});
  ExpectTiled(view, 1, kSteps);
  // 128 of 2 steps, 128 of 4, and so on: 128 (2 + 4 + ... + 256) are more.
  EXPECT_LE(view.entries.size(), kWhole + 8 * 128);
  uint64_t steps = 0;
  for (size_t i = 0; i < view.entries.size(); ++i) {
    const HistoryEntry& entry = view.entries[i];
    const uint64_t length = entry.last_step - entry.first_step + 1;
    EXPECT_LE(length, std::max<uint64_t>(1, (kSteps - entry.last_step) / 64));
    const HistoryCell norm = CellOf(view, i, "norm");
    const bool spike = entry.first_step <= kSpike && kSpike <= entry.last_step;
    const bool skip = entry.first_step <= kSkip && kSkip <= entry.last_step;
    EXPECT_EQ(norm.max, spike ? 900 : 1);
    EXPECT_EQ(norm.min, 1);
    EXPECT_NEAR(norm.mean, spike ? 1 + 899.0 / length : 1, 1e-3);
    EXPECT_EQ(norm.non_finite, skip ? 1u : 0u);
    EXPECT_EQ(entry.skipped_steps, skip ? 1u : 0u);
    steps += norm.finite + norm.non_finite;
  }
  EXPECT_EQ(steps, kSteps);
  ASSERT_EQ(view.skips.size(), 1u);
  EXPECT_EQ(view.skips[0].reason, "step 30123");
}

TEST(JobHistory, JoinsNeighboursForWhoCanShowFewEntries) {
  JobHistory history(TwoGroups());
  for (uint64_t step = 1; step <= 5000; ++step) history.Add(Record(step, step), {});
  for (const uint32_t most : {1, 7, 100, 999}) {
    const HistoryView view = history.Read({.max_entries = most});
    EXPECT_LE(view.entries.size(), most);
    EXPECT_GE(view.entries.size(), most / 2);
    ExpectTiled(view, 1, 5000);
    EXPECT_EQ(CellOf(view, 0, "norm").min, 1);
    EXPECT_EQ(CellOf(view, view.entries.size() - 1, "norm").max, 5000);
  }
  const HistoryView part =
      history.Read({.first_step = 4900, .last_step = 4909, .max_entries = 500});
  ASSERT_EQ(part.entries.size(), 10u);
  ExpectTiled(part, 4900, 4909);
  EXPECT_TRUE(history.Read({.first_step = 6000}).entries.empty());
}

TEST(JobHistory, TakesTheNumbersOfTheLowestRankAndTheSecondsOfTheSlowest) {
  JobHistory history(TwoGroups());
  history.Report(1, 2, {.numbers = {{"loss", 2}}, .seconds = RankSeconds{.compute = 5, .wait = 1}});
  history.Report(1, 1, {.numbers = {{"loss", 1}}, .seconds = RankSeconds{.compute = 7, .send = 3}});
  history.Report(1, 3, {.numbers = {{"loss", 3}}, .seconds = RankSeconds{.compute = 6}});
  history.SetGroupNorms(1, {3, 4});
  history.Add(Record(1, 5), {.job_bytes = 10, .service_bytes = 20});
  history.Add(Record(2, 5), {});
  const HistoryView view = history.Read({});
  EXPECT_EQ(NumberOf(view, 0, "loss").mean, 1);
  EXPECT_EQ(view.entries[0].slowest_rank, 1);
  EXPECT_EQ(CellOf(view, 0, "compute", HistorySource::kRank).mean, 7);
  EXPECT_EQ(CellOf(view, 0, "send", HistorySource::kRank).mean, 3);
  EXPECT_EQ(CellOf(view, 0, "group1", HistorySource::kGroup).mean, 4);
  EXPECT_EQ(CellOf(view, 0, "memory_bytes").mean, 10);
  EXPECT_EQ(CellOf(view, 0, "service_memory_bytes").mean, 20);
  // Nothing of one step is taken for another one's.
  EXPECT_EQ(NumberOf(view, 1, "loss").finite, 0u);
  EXPECT_EQ(view.entries[1].slowest_rank, -1);
  EXPECT_EQ(CellOf(view, 1, "group1", HistorySource::kGroup).finite, 0u);
}

TEST(JobHistory, CountsNumbersThatAreNotFinite) {
  JobHistory history(TwoGroups());
  for (uint64_t step = 1; step <= 2; ++step) {
    history.Report(step, 0, {.numbers = {{"loss", step == 1 ? std::nan("") : 4}}, .seconds = {}});
    history.Add(Record(step), {});
  }
  const HistoryView view = history.Read({.max_entries = 1});
  EXPECT_EQ(NumberOf(view, 0, "loss").non_finite, 1u);
  EXPECT_EQ(NumberOf(view, 0, "loss").mean, 4);
}

TEST(JobHistory, RemembersSixteenNamesAndGivesUpTheOneThatWasGivenLongestAgo) {
  JobHistory history(TwoGroups());
  auto step = [&, number = uint64_t{0}](std::map<std::string, double> numbers) mutable {
    history.Report(++number, 0, {.numbers = std::move(numbers), .seconds = {}});
    history.Add(Record(number), {});
  };
  step({{"old", 1}});
  for (int i = 1; i < 16; ++i) step({{"n" + std::to_string(i), i}, {"loss", i}});  // 17 names.
  const HistoryView view = history.Read({});
  const auto is_number = [](const HistoryColumn& column) {
    return column.source == HistorySource::kTrainer;
  };
  EXPECT_EQ(std::count_if(view.columns.begin(), view.columns.end(), is_number), 16);
  EXPECT_EQ(NumberOf(view, 0, "old").finite, 0u);
  EXPECT_EQ(NumberOf(view, 15, "loss").mean, 15);
  EXPECT_EQ(NumberOf(view, 1, "n1").mean, 1);
  // Nothing of "old" is taken for what has its place.
  EXPECT_EQ(NumberOf(view, 0, "n15").finite, 0u);
  const LatestReports latest = history.Latest();
  EXPECT_EQ(latest.numbers.size(), 16u);
  EXPECT_EQ(latest.numbers.count("old"), 0u);
  EXPECT_EQ(latest.numbers.at("n1"), 1);
}

TEST(RankReport, HasNamesThatAreShortAndPlain) {
  for (const std::string& name : {std::string("loss"), std::string("eval/loss"),
                                  std::string("a.B_c-9"), std::string(64, 'x')}) {
    EXPECT_TRUE(CheckNumberName(name).ok()) << name;
  }
  for (const std::string& name : {std::string(), std::string("tokens a second"),
                                  std::string("l\xc3\xa4ss"), std::string(65, 'x')}) {
    EXPECT_EQ(CheckNumberName(name).code(), absl::StatusCode::kInvalidArgument) << name;
  }
  RankReport report;
  for (int i = 0; i < 17; ++i) report.numbers["n" + std::to_string(i)] = i;
  EXPECT_EQ(CheckReport(report).code(), absl::StatusCode::kInvalidArgument);
  report.numbers.erase("n3");
  EXPECT_TRUE(CheckReport(report).ok());
}

class JobWithReports : public JobDriverTest {
 protected:
  static void Step(JobDriver& driver, bool reports, uint64_t seed) {
    const uint64_t step = driver.next_step();
    driver.BeginAll();
    driver.SendAll(seed, 0, /*final=*/true);
    driver.EndMicroStepAll(0);
    for (int rank = 0; rank < 2; ++rank) {
      if (reports) {
        // Of each rank another one.
        const RankReport report = {.numbers = {{"loss", 10.0 * rank + step}},
                                   .seconds = RankSeconds{.compute = 1.0 + rank}};
        EXPECT_TRUE(driver.stream(rank).Report(driver.at(rank), report).ok());
      }
      EXPECT_FALSE(driver.Seal(rank, 1).has_value());
    }
    for (int rank = 0; rank < 2; ++rank) driver.listener(rank).WaitForCommit(step);
  }
};

TEST_F(JobWithReports, HasTheSameBitsAndKnowsThem) {
  JobSpec spec = TwoGroups();
  spec.keep_previous = true;
  JobDriver with = Make(spec);
  spec.name = "without";
  JobDriver without = Make(spec);
  for (uint64_t seed = 2; seed < 6; ++seed) {
    Step(with, true, seed);
    Step(without, false, seed);
  }
  EXPECT_EQ(with.job().StateHash(), without.job().StateHash());
  const HistoryView view = with.job().History({});
  ExpectTiled(view, 1, 4);
  EXPECT_EQ(NumberOf(view, 3, "loss").mean, 4);
  EXPECT_EQ(view.entries[3].slowest_rank, 1);
  const float norms[] = {CellOf(view, 3, "group0", HistorySource::kGroup).mean,
                         CellOf(view, 3, "group1", HistorySource::kGroup).mean};
  EXPECT_GT(std::min(norms[0], norms[1]), 0);
  EXPECT_NEAR(std::hypot(norms[0], norms[1]), CellOf(view, 3, "norm").mean, 1e-3);
  EXPECT_GT(CellOf(view, 3, "step_seconds").mean, 0);
  EXPECT_EQ(with.job().Status().latest.numbers.at("loss"), 4);
  // A name that cannot be is refused, and leaves the stream as it is.
  EXPECT_EQ(with.stream(0).Report(with.at(0), {.numbers = {{"a b", 1}}, .seconds = {}}).code(),
            absl::StatusCode::kInvalidArgument);

  EXPECT_TRUE(with.job().UndoStep().ok());
  ExpectTiled(with.job().History({}), 1, 3);
}

}  // namespace
}  // namespace ballast::job_history_test
