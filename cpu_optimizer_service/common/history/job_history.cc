#include "cpu_optimizer_service/common/history/job_history.h"

#include <algorithm>
#include <cmath>

namespace ballast {
namespace {

constexpr float kAbsent = std::numeric_limits<float>::quiet_NaN();
constexpr float kNotFinite = std::numeric_limits<float>::infinity();

// The columns that every job has, in their order.
enum ServiceColumn : uint8_t {
  kNorm,
  kClipCoefficient,
  kLossScale,
  kLr,
  kStepSeconds,
  kGatheringSeconds,
  kAwaitingSeconds,
  kDecidingSeconds,
  kUpdatingSeconds,
  kMemoryBytes,
  kServiceMemoryBytes,
  kCompute,
  kReduce,
  kSend,
  kWait,
  kFirstGroup
};
constexpr std::array<const char*, kCompute> kServiceNames = {"norm",
                                                             "clip_coefficient",
                                                             "loss_scale",
                                                             "lr",
                                                             "step_seconds",
                                                             "gathering_seconds",
                                                             "awaiting_seconds",
                                                             "deciding_seconds",
                                                             "updating_seconds",
                                                             "memory_bytes",
                                                             "service_memory_bytes"};
constexpr std::array<const char*, kFirstGroup - kCompute> kRankNames = {"compute", "reduce", "send",
                                                                        "wait"};

float Value(double value) {
  const auto narrow = static_cast<float>(value);
  return std::isfinite(narrow) ? narrow : kNotFinite;
}

// Neighbours that end in the same of `pieces` equal parts of the steps become one.
std::vector<HistoryEntry> Joined(std::vector<HistoryEntry> entries, uint32_t pieces) {
  if (pieces == 0 || entries.size() <= pieces) return entries;
  const uint64_t first = entries.front().first_step;
  const uint64_t steps = entries.back().last_step - first + 1;
  std::vector<HistoryEntry> joined;
  uint64_t last_piece = 0;
  for (HistoryEntry& entry : entries) {
    // Of at most 2^34 steps and 2^29 pieces no product overflows.
    const uint64_t piece =
        (entry.last_step - first) * std::min<uint64_t>(pieces, uint64_t{1} << 29) / steps;
    if (joined.empty() || piece != last_piece) {
      joined.push_back(std::move(entry));
    } else {
      joined.back().Join(entry);
    }
    last_piece = piece;
  }
  return joined;
}

}  // namespace

void HistoryCell::Join(const HistoryCell& other) {
  non_finite += other.non_finite;
  if (other.finite == 0) return;
  if (finite == 0) {
    min = other.min;
    mean = other.mean;
    max = other.max;
  } else {
    min = std::min(min, other.min);
    max = std::max(max, other.max);
    const double sum = double{mean} * finite + double{other.mean} * other.finite;
    mean = static_cast<float>(sum / (double{1} * finite + other.finite));
  }
  finite += other.finite;
}

void HistoryEntry::Join(const HistoryEntry& next) {
  last_step = next.last_step;
  skipped_steps += next.skipped_steps;
  committed_unix_ms = next.committed_unix_ms;
  if (next.slowest_rank >= 0 && (slowest_rank < 0 || next.slowest_compute > slowest_compute)) {
    slowest_rank = next.slowest_rank;
    slowest_compute = next.slowest_compute;
  }
  if (cells.size() < next.cells.size()) cells.resize(next.cells.size());
  for (size_t column = 0; column < next.cells.size(); ++column) {
    cells[column].Join(next.cells[column]);
  }
}

JobHistory::JobHistory(const JobSpec& spec)
    : group_count_(std::min(spec.groups.size(), kHistoryGroups)),
      first_number_(kFirstGroup + group_count_) {
  for (const char* name : kServiceNames) columns_.push_back({name, HistorySource::kService});
  for (const char* name : kRankNames) columns_.push_back({name, HistorySource::kRank});
  for (size_t group = 0; group < group_count_; ++group) {
    columns_.push_back({spec.groups[group].name, HistorySource::kGroup});
  }
}

JobHistory::Told& JobHistory::Of(uint64_t step) {
  if (told_.step != step) told_ = {.step = step, .numbers = {}, .seconds = {}, .group_norms = {}};
  return told_;
}

void JobHistory::Report(uint64_t step, int rank, const RankReport& report) {
  const MutexLock lock(mutex_);
  Told& told = Of(step);
  const bool counts = told.numbers_rank < 0 || rank <= told.numbers_rank;
  if (!report.numbers.empty() && counts) {
    told.numbers_rank = rank;
    told.numbers = report.numbers;
  }
  if (!report.seconds.has_value()) return;
  if (told.slowest_rank < 0 || told.slowest_rank == rank ||
      report.seconds->compute > told.seconds.compute) {
    told.slowest_rank = rank;
    told.seconds = *report.seconds;
  }
}

void JobHistory::SetGroupNorms(uint64_t step, absl::Span<const double> norms) {
  const MutexLock lock(mutex_);
  norms = norms.first(std::min(norms.size(), group_count_));
  Of(step).group_norms.assign(norms.begin(), norms.end());
}

void JobHistory::Add(const StepRecord& record, const Memory& memory) {
  const MutexLock lock(mutex_);
  AddLocked(record, &memory);
}

void JobHistory::AddEarlier(const StepRecord& record) {
  const MutexLock lock(mutex_);
  AddLocked(record, nullptr);
}

void JobHistory::AddLocked(const StepRecord& record, const Memory* memory) {
  const uint64_t step = record.outcome.step;
  Whole whole;
  whole.head.first_step = whole.head.last_step = step;
  whole.values.assign(columns_.size(), kAbsent);
  std::vector<float>& values = whole.values;
  // Of a step that was given up there is none.
  if (record.outcome.skip_cause != SkipCause::kNotKept) {
    values[kNorm] = Value(record.outcome.decision.norm);
  }
  values[kClipCoefficient] = Value(record.outcome.decision.clip_coefficient);
  values[kLossScale] = Value(record.loss_scale);
  if (!record.hyper_parameters.empty()) values[kLr] = Value(record.hyper_parameters.front().lr);
  values[kGatheringSeconds] = Value(record.times.gathering);
  values[kAwaitingSeconds] = Value(record.times.awaiting);
  values[kDecidingSeconds] = Value(record.times.deciding);
  values[kUpdatingSeconds] = Value(record.times.updating);
  if (!record.outcome.decision.apply) {
    whole.head.skipped_steps = 1;
    skips_.push_back({step, record.outcome.skip_reason});
    if (skips_.size() > kHistorySkips) skips_.pop_front();
  }
  if (memory != nullptr) {
    const auto now = std::chrono::steady_clock::now();
    if (last_commit_.has_value()) {
      values[kStepSeconds] = Value(std::chrono::duration<double>(now - *last_commit_).count());
    }
    last_commit_ = now;
    whole.head.committed_unix_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                                       std::chrono::system_clock::now().time_since_epoch())
                                       .count();
    values[kMemoryBytes] = Value(static_cast<double>(memory->job_bytes));
    values[kServiceMemoryBytes] = Value(static_cast<double>(memory->service_bytes));
  }
  const Told& told = Of(step);
  if (told.slowest_rank >= 0) {
    whole.head.slowest_rank = told.slowest_rank;
    whole.head.slowest_compute = Value(told.seconds.compute);
    values[kCompute] = Value(told.seconds.compute);
    values[kReduce] = Value(told.seconds.reduce);
    values[kSend] = Value(told.seconds.send);
    values[kWait] = Value(told.seconds.wait);
  }
  latest_.slowest_rank = told.slowest_rank;
  latest_.seconds = told.seconds;
  latest_.group_norms = told.group_norms;
  for (size_t group = 0; group < told.group_norms.size(); ++group) {
    values[kFirstGroup + group] = Value(told.group_norms[group]);
  }
  for (const auto& [name, value] : told.numbers) {
    const size_t column = ColumnOf(name, step);
    values.resize(columns_.size(), kAbsent);
    values[column] = Value(value);
    latest_.numbers[name] = value;
  }
  told_ = {};
  whole_.push_back(std::move(whole));
  Thin();
}

size_t JobHistory::ColumnOf(const std::string& name, uint64_t step) {
  size_t oldest = first_number_;
  for (size_t column = first_number_; column < columns_.size(); ++column) {
    if (columns_[column].name == name) {
      last_given_[column - first_number_] = step;
      return column;
    }
    if (last_given_[column - first_number_] < last_given_[oldest - first_number_]) oldest = column;
  }
  if (last_given_.size() < kMostNumbers) {
    columns_.push_back({name, HistorySource::kTrainer});
    last_given_.push_back(step);
    return columns_.size() - 1;
  }
  latest_.numbers.erase(columns_[oldest].name);
  columns_[oldest].name = name;
  last_given_[oldest - first_number_] = step;
  for (Whole& whole : whole_) {
    if (oldest < whole.values.size()) whole.values[oldest] = kAbsent;
  }
  for (std::deque<HistoryEntry>& level : levels_) {
    for (HistoryEntry& entry : level) {
      if (oldest < entry.cells.size()) entry.cells[oldest] = {};
    }
  }
  return oldest;
}

HistoryEntry JobHistory::EntryOf(const Whole& whole) {
  HistoryEntry entry = whole.head;
  entry.cells.reserve(whole.values.size());
  for (const float value : whole.values) {
    HistoryCell& cell = entry.cells.emplace_back();
    if (std::isnan(value)) continue;
    if (std::isinf(value)) {
      cell.non_finite = 1;
    } else {
      cell = {.min = value, .mean = value, .max = value, .finite = 1};
    }
  }
  return entry;
}

void JobHistory::Thin() {
  if (whole_.size() <= kWholeEntries) return;
  HistoryEntry entry = EntryOf(whole_[0]);
  entry.Join(EntryOf(whole_[1]));
  whole_.erase(whole_.begin(), whole_.begin() + 2);
  for (size_t level = 0; level < kMostLevels; ++level) {
    if (level == levels_.size()) levels_.emplace_back();
    std::deque<HistoryEntry>& entries = levels_[level];
    entries.push_back(std::move(entry));
    if (entries.size() <= kLevelEntries) return;
    entry = std::move(entries[0]);
    entry.Join(entries[1]);
    entries.erase(entries.begin(), entries.begin() + 2);
  }
}

void JobHistory::GoOnFrom(const JobHistory& other) {
  const MutexLock theirs(other.mutex_);
  const MutexLock lock(mutex_);
  columns_.resize(first_number_);
  columns_.insert(columns_.end(), other.columns_.begin() + other.first_number_,
                  other.columns_.end());
  last_given_ = other.last_given_;
  // By column here, the one there; none: a group that the other has not.
  std::vector<size_t> from(columns_.size(), other.columns_.size());
  for (size_t column = 0; column < columns_.size(); ++column) {
    const HistoryColumn& ours = columns_[column];
    if (column >= first_number_) {
      from[column] = column - first_number_ + other.first_number_;
      continue;
    }
    for (size_t there = 0; there < other.first_number_; ++there) {
      const HistoryColumn& their = other.columns_[there];
      if (their.source == ours.source && their.name == ours.name) from[column] = there;
    }
  }
  const auto in_order = [&](const auto& values, const auto& absent) {
    std::decay_t<decltype(values)> ordered;
    for (const size_t column : from) {
      ordered.push_back(column < values.size() ? values[column] : absent);
    }
    return ordered;
  };
  whole_ = other.whole_;
  for (Whole& whole : whole_) whole.values = in_order(whole.values, kAbsent);
  levels_ = other.levels_;
  for (std::deque<HistoryEntry>& level : levels_) {
    for (HistoryEntry& entry : level) entry.cells = in_order(entry.cells, HistoryCell());
  }
  skips_ = other.skips_;
  latest_ = other.latest_;
  latest_.group_norms.clear();  // Of the other's groups.
  last_commit_ = other.last_commit_;
}

void JobHistory::Undo() {
  const MutexLock lock(mutex_);
  if (whole_.empty()) return;
  if (!skips_.empty() && skips_.back().step == whole_.back().head.last_step) skips_.pop_back();
  whole_.pop_back();
}

void JobHistory::Clear() {
  const MutexLock lock(mutex_);
  columns_.resize(first_number_);
  last_given_.clear();
  whole_.clear();
  levels_.clear();
  skips_.clear();
  told_ = {};
  latest_ = {};
  last_commit_.reset();
}

HistoryView JobHistory::Read(const HistoryQuery& query) const {
  const uint64_t last =
      query.last_step == 0 ? std::numeric_limits<uint64_t>::max() : query.last_step;
  const auto wanted = [&](const HistoryEntry& entry) {
    return entry.last_step >= query.first_step && entry.first_step <= last;
  };
  HistoryView view;
  {
    const MutexLock lock(mutex_);
    view.columns = columns_;
    view.skips.assign(skips_.begin(), skips_.end());
    for (size_t level = levels_.size(); level-- > 0;) {
      std::copy_if(levels_[level].begin(), levels_[level].end(), std::back_inserter(view.entries),
                   wanted);
    }
    for (const Whole& whole : whole_) {
      if (wanted(whole.head)) view.entries.push_back(EntryOf(whole));
    }
  }
  view.entries = Joined(std::move(view.entries), query.max_entries);
  return view;
}

LatestReports JobHistory::Latest() const {
  const MutexLock lock(mutex_);
  return latest_;
}

}  // namespace ballast
