#include "server/jobs/history_message.h"

#include <algorithm>
#include <cstddef>

#include "proto/convert.h"

namespace ballast::server {
namespace {

static_assert(v1::FROM_RANK == static_cast<int>(HistorySource::kRank) + 1);

v1::HistoryColumn Column(const HistoryView& view, size_t index) {
  v1::HistoryColumn column;
  column.set_name(view.columns[index].name);
  column.set_source(proto::EnumToProto<v1::HistorySource>(view.columns[index].source));
  for (const HistoryEntry& entry : view.entries) {
    const HistoryCell cell = entry.cell(index);
    column.add_min(cell.min);
    column.add_mean(cell.mean);
    column.add_max(cell.max);
    column.add_non_finite(cell.non_finite);
  }
  const auto& counts = column.non_finite();
  if (std::all_of(counts.begin(), counts.end(), [](uint32_t count) { return count == 0; })) {
    column.clear_non_finite();
  }
  return column;
}

}  // namespace

v1::JobHistory ToMessage(const HistoryView& view) {
  v1::JobHistory message;
  for (const HistoryEntry& entry : view.entries) {
    v1::HistoryEntry& to = *message.add_entries();
    to.set_first_step(entry.first_step);
    to.set_last_step(entry.last_step);
    to.set_skipped_steps(entry.skipped_steps);
    to.set_committed_unix_ms(entry.committed_unix_ms);
    to.set_slowest_rank(entry.slowest_rank);
  }
  for (size_t index = 0; index < view.columns.size(); ++index) {
    *message.add_columns() = Column(view, index);
  }
  for (const SkippedStep& skip : view.skips) {
    v1::SkippedStep& to = *message.add_skips();
    to.set_step(skip.step);
    to.set_reason(skip.reason);
  }
  return message;
}

}  // namespace ballast::server
