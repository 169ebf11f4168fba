#include "cpu_optimizer_service/common/text/activity.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/text/amounts.h"

namespace ballast {
namespace {

// Before that a rate says little, and a stop may be a pause.
constexpr double kFirstRateSeconds = 1;
constexpr double kLongSeconds = 10;

thread_local Progress* of_this_thread = nullptr;

const char* Doing(ActivityKind kind) {
  switch (kind) {
    case ActivityKind::kMakingMemory:
      return "making its memory";
    case ActivityKind::kTakingFirstWeights:
      return "taking first weights";
    case ActivityKind::kMakingSecondVersions:
      return "making memory for second versions";
    case ActivityKind::kWritingCheckpoint:
      return "writing a checkpoint";
    case ActivityKind::kVerifyingCheckpoint:
      return "verifying a checkpoint";
    case ActivityKind::kLoadingCheckpoint:
      return "loading a checkpoint";
    case ActivityKind::kExportingWeights:
      return "exporting weights";
    case ActivityKind::kOther:
      break;
  }
  return "at work";
}

const char* Preposition(ActivityKind kind) {
  return kind == ActivityKind::kLoadingCheckpoint ? " of " : " in ";
}

double Rounded(double value) { return std::round(10 * value) / 10; }

// "3.1 of 5.2 GiB": in one unit, so that the two can be compared.
std::string Amounts(int64_t done, int64_t total) {
  constexpr std::pair<double, const char*> kUnits[] = {
      {0x1p40, "TiB"}, {0x1p30, "GiB"}, {0x1p20, "MiB"}, {0x1p10, "KiB"}, {1, "B"}};
  const auto largest = static_cast<double>(std::max(done, total));
  const auto* const unit =
      std::find_if(std::begin(kUnits), std::end(kUnits) - 1,
                   [largest](const auto& candidate) { return largest >= candidate.first; });
  const auto in_unit = [unit](int64_t bytes) {
    return Rounded(static_cast<double>(bytes) / unit->first);
  };
  if (total <= 0) return absl::StrCat(in_unit(done), " ", unit->second);
  return absl::StrCat(in_unit(done), " of ", in_unit(total), " ", unit->second);
}

}  // namespace

std::string ToLine(const Activity& activity) {
  std::string line = Doing(activity.kind);
  if (!activity.directory.empty()) {
    absl::StrAppend(&line, Preposition(activity.kind), activity.directory);
  }
  absl::StrAppend(&line, ": ", Amounts(activity.done_bytes, activity.total_bytes));
  if (activity.seconds_since_progress > kLongSeconds) {
    return absl::StrCat(line, ", and nothing more for ",
                        std::round(activity.seconds_since_progress), " s");
  }
  if (activity.seconds < kFirstRateSeconds || activity.done_bytes <= 0) return line;
  const double rate = static_cast<double>(activity.done_bytes) / activity.seconds;
  absl::StrAppend(&line, ", ", FormatBytes(static_cast<int64_t>(rate)), "/s");
  if (activity.total_bytes > activity.done_bytes) {
    const double left = static_cast<double>(activity.total_bytes - activity.done_bytes) / rate;
    absl::StrAppend(&line, ", ",
                    absl::FormatDuration(absl::Ceil(absl::Seconds(left), absl::Seconds(1))),
                    " left");
  }
  return line;
}

Progress& Progress::OfThisThread() {
  thread_local Progress unseen;
  return of_this_thread != nullptr ? *of_this_thread : unseen;
}

CountsIn::CountsIn(Progress& progress) : before_(std::exchange(of_this_thread, &progress)) {}
CountsIn::~CountsIn() { of_this_thread = before_; }

std::shared_ptr<Progress> Activities::Begin(What what) {
  auto progress = std::make_shared<Progress>(what.total_bytes);
  MutexLock lock(mutex_);
  std::erase_if(entries_, [](const Entry& entry) { return entry.progress.expired(); });
  entries_.push_back({.number = ++last_, .what = std::move(what), .progress = progress});
  return progress;
}

std::vector<Activity> Activities::List() const {
  std::vector<Activity> all;
  MutexLock lock(mutex_);
  for (const Entry& entry : entries_) {
    const std::shared_ptr<const Progress> progress = entry.progress.lock();
    if (progress == nullptr) continue;
    all.push_back({.number = entry.number,
                   .kind = entry.what.kind,
                   .job = entry.what.job,
                   .directory = entry.what.directory,
                   .done_bytes = progress->done_bytes(),
                   .total_bytes = progress->total_bytes(),
                   .seconds = progress->seconds(),
                   .seconds_since_progress = progress->seconds_since_progress()});
  }
  return all;
}

}  // namespace ballast
