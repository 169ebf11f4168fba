#include "cpu_optimizer_service/job/core/job_record.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

std::string MakeJobUid() {
  std::random_device random;
  std::string uid;
  for (int i = 0; i < 4; ++i) absl::StrAppend(&uid, absl::Hex(random(), absl::kZeroPad8));
  return uid;
}

void StepHistory::Add(StepRecord record, bool coverage_complete) {
  ++(record.outcome.decision.apply ? applied_steps : skipped_steps);
  if (coverage_complete) ++coverage_complete_steps;
  if (!record.outcome.decision.apply) {
    ++statistics.skips[static_cast<size_t>(record.outcome.skip_cause)];
  } else if (record.outcome.decision.clip_coefficient < 1) {
    ++statistics.clipped_steps;
  }
  statistics.gathering.Add(record.times.gathering);
  statistics.awaiting.Add(record.times.awaiting);
  statistics.deciding.Add(record.times.deciding);
  statistics.updating.Add(record.times.updating);
  // Updates are counted as speculated when they are made; what became of them is known only now.
  speculation.published += record.speculation.published;
  speculation.redone += record.speculation.redone;
  // The whole history is a part of the record that is stored at each step, so it must stay small.
  std::vector<std::string>& names = record.outcome.unused_parameters;
  names.resize(std::min(names.size(), kRecordedNames));
  recent_steps.push_back(std::move(record));
  if (recent_steps.size() > kRecentSteps) recent_steps.pop_front();
}

void StepHistory::Replace(const StepRecord* last) {
  recent_steps.clear();
  if (last != nullptr) recent_steps.push_back(*last);
}

}  // namespace ballast
