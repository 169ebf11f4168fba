#include "gpu_worker/run/progress.h"

#include <unistd.h>

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ballast::worker {

std::string FormatProgress(const StepReport& report, uint64_t steps) {
  const StepTimes& times = report.times;
  std::string line = absl::StrFormat(
      "step %d/%d  loss %.4f  norm %.3f  %.0f tokens/s  %.0f ms: compute %.0f reduce %.0f send "
      "%.0f "
      "update %.0f receive %.0f",
      report.step, steps, report.loss, report.norm, report.tokens_per_second, 1e3 * report.seconds,
      1e3 * times.compute, 1e3 * times.reduce, 1e3 * times.send, 1e3 * times.update,
      1e3 * times.receive);
  if (!report.applied) absl::StrAppend(&line, "  skipped: ", report.skip_reason);
  return line;
}

Progress::Progress(uint64_t steps) : steps_(steps), terminal_(isatty(STDOUT_FILENO) == 1) {}

std::string FormatSummary(const RunTotals& totals) {
  return absl::StrFormat("%d steps in %.1f s, %.2f s of them exposed (%.1f%%)", totals.steps,
                         totals.seconds, totals.exposed, 100 * totals.exposed / totals.seconds);
}

Progress::~Progress() {
  // The line on a terminal has no end yet: what the shell prints next would follow it.
  if (line_open_) std::puts("");
  if (totals_.steps > 0) std::puts(FormatSummary(totals_).c_str());
}

void Progress::Show(const StepReport& report) {
  ++totals_.steps;
  totals_.seconds += report.seconds;
  totals_.exposed += report.times.exposed();
  const std::string line = FormatProgress(report, steps_);
  if (terminal_) {
    constexpr char kToLineStart[] = "\r";
    constexpr char kEraseToLineEnd[] = "\033[K";
    std::printf("%s%s%s", kToLineStart, line.c_str(), kEraseToLineEnd);
    line_open_ = true;
  } else {
    std::printf("%s\n", line.c_str());
  }
  // A pipe or a file is buffered, and somebody may be waiting for each line.
  std::fflush(stdout);
}

}  // namespace ballast::worker
