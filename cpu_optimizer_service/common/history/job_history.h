// The history of a job's steps, thinned, for people who look for a spike.
//
// Each of the last kWholeEntries steps has an entry. When one more comes, the two oldest become one
// of kLevelEntries entries of two steps. Of those the two oldest become one of four steps, and so
// on. So an entry that ends `a` steps ago has at most a / 64 steps. A cell keeps its steps'
// extremes, so no spike is lost.
//
// Whole entries take 4 bytes a column, others 20. A job of two groups and two numbers takes 0.2 MB
// for a thousand steps and 0.8 MB for a million; with every column 1.7 MB. The history ends with
// the process.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HISTORY_JOB_HISTORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HISTORY_JOB_HISTORY_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cpu_optimizer_service/common/history/rank_report.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

inline constexpr size_t kHistoryGroups = 16;  // The first groups; only their norms are kept.
inline constexpr size_t kHistorySkips = 64;  // The last skipped steps; only their reasons are kept.

enum class HistorySource : uint8_t { kService, kGroup, kTrainer, kRank };

struct HistoryColumn {
  std::string name;
  HistorySource source = HistorySource::kService;
};

// One number over the steps of an entry. Extremes and mean are NaN if no step has a finite one.
struct HistoryCell {
  float min = std::numeric_limits<float>::quiet_NaN();
  float mean = std::numeric_limits<float>::quiet_NaN();
  float max = std::numeric_limits<float>::quiet_NaN();
  uint32_t finite = 0;
  uint32_t non_finite = 0;

  void Join(const HistoryCell& other);
};

// Consecutive decided steps.
struct HistoryEntry {
  uint64_t first_step = 0;
  uint64_t last_step = 0;
  uint32_t skipped_steps = 0;
  int64_t committed_unix_ms = 0;   // Of the last step; 0: before this process.
  int32_t slowest_rank = -1;       // The rank that computed longest; -1: no rank reports that.
  float slowest_compute = 0;       // Its seconds.
  std::vector<HistoryCell> cells;  // By column; missing ones at the end are empty.

  HistoryCell cell(size_t column) const {
    return column < cells.size() ? cells[column] : HistoryCell();
  }
  void Join(const HistoryEntry& next);
};

struct SkippedStep {
  uint64_t step = 0;
  std::string reason;
};

struct HistoryQuery {
  uint64_t first_step = 0;   // Leave out entries that end before it.
  uint64_t last_step = 0;    // Leave out entries that begin after it; 0: no limit.
  uint32_t max_entries = 0;  // Join neighbours down to this number; 0: do not join.
};
struct HistoryView {
  std::vector<HistoryColumn> columns;
  std::vector<HistoryEntry> entries;  // Oldest first.
  std::vector<SkippedStep> skips;
};

// The latest reports about committed steps.
struct LatestReports {
  std::map<std::string, double> numbers;  // The last value of each name.
  std::vector<double> group_norms;        // Of the first kHistoryGroups.
  int slowest_rank = -1;                  // -1: no rank reports its seconds.
  RankSeconds seconds;                    // Of that rank.
};

// Thread-safe, with its own lock: a reader delays a step at most for a copy.
class JobHistory {
 public:
  explicit JobHistory(const JobSpec& spec);

  // About the step in progress. A rank may repeat it: the last report counts.
  void Report(uint64_t step, int rank, const RankReport& report);
  void SetGroupNorms(uint64_t step, absl::Span<const double> norms);
  // The step is committed. Reports about it become part of it; reports about other steps are
  // dropped.
  struct Memory {
    int64_t job_bytes = 0;
    int64_t service_bytes = 0;
  };
  void Add(const StepRecord& record, const Memory& memory);
  // A step that another process has committed; only its record is known.
  void AddEarlier(const StepRecord& record);
  // Replaces this history by another job's. A group's norms are those of the group of the same
  // name.
  void GoOnFrom(const JobHistory& other);
  void Undo();  // Forgets the last step.
  void Clear();

  HistoryView Read(const HistoryQuery& query) const;
  LatestReports Latest() const;

 private:
  static constexpr size_t kWholeEntries = 1024;
  static constexpr size_t kLevelEntries = 128;
  static constexpr size_t kMostLevels = 24;  // 2^31 steps; older ones are dropped.

  // One step. A value is NaN if the step lacks it, and infinite if it is not finite.
  struct Whole {
    HistoryEntry head;  // Without cells.
    std::vector<float> values;
  };
  static HistoryEntry EntryOf(const Whole& whole);

  // Reports about a step before its commit.
  struct Told {
    uint64_t step = 0;
    int numbers_rank = -1;
    std::map<std::string, double> numbers;
    int slowest_rank = -1;
    RankSeconds seconds;
    std::vector<double> group_norms;
  };
  Told& Of(uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddLocked(const StepRecord& record, const Memory* memory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The column of a trainer's number: its present one, a new one, or that of the name reported
  // longest ago.
  size_t ColumnOf(const std::string& name, uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Thin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t group_count_;
  const size_t first_number_;  // The first of the trainer's columns, which come last.

  mutable Mutex mutex_;
  std::vector<HistoryColumn> columns_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> last_given_ ABSL_GUARDED_BY(mutex_);  // By number: the step.
  std::deque<Whole> whole_ ABSL_GUARDED_BY(mutex_);
  // Of level l: entries of 2^(l+1) steps.
  std::vector<std::deque<HistoryEntry>> levels_ ABSL_GUARDED_BY(mutex_);
  std::deque<SkippedStep> skips_ ABSL_GUARDED_BY(mutex_);
  Told told_ ABSL_GUARDED_BY(mutex_);
  LatestReports latest_ ABSL_GUARDED_BY(mutex_);
  std::optional<std::chrono::steady_clock::time_point> last_commit_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HISTORY_JOB_HISTORY_H_
