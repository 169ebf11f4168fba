#include "gpu_worker/run/loss_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "gpu_worker/run/run_output.h"

namespace ballast::worker {
namespace {

constexpr absl::string_view kHeader =
    "step,loss,norm,clip,tokens_per_second,seconds,compute,reduce,send,update,receive\n";
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// "nan" for any, also those with a sign.
double Plain(double value) { return std::isnan(value) ? kUnknown : value; }

// A line has nine digits of what trainings are compared by, and six of what is only timed.
std::string LineOf(const StepReport& report) {
  const StepTimes& times = report.times;
  return absl::StrFormat("%d,%.9g,%.9g,%.9g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g\n", report.step,
                         Plain(report.loss), Plain(report.norm), Plain(report.clip_coefficient),
                         report.tokens_per_second, report.seconds, times.compute, times.reduce,
                         times.send, times.update, times.receive);
}

std::optional<StepReport> ParseLine(absl::string_view line) {
  StepReport report;
  report.applied = true;
  StepTimes& times = report.times;
  const std::vector<absl::string_view> words = absl::StrSplit(line, ',');
  const std::vector<double*> values = {&report.loss,
                                       &report.norm,
                                       &report.clip_coefficient,
                                       &report.tokens_per_second,
                                       &report.seconds,
                                       &times.compute,
                                       &times.reduce,
                                       &times.send,
                                       &times.update,
                                       &times.receive};
  if (words.size() != values.size() + 1 || !absl::SimpleAtoi(words[0], &report.step)) {
    return std::nullopt;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (!absl::SimpleAtod(words[i + 1], values[i])) return std::nullopt;
  }
  return report;
}

}  // namespace

std::string LossesCsv(absl::Span<const StepReport> reports) {
  std::string csv(kHeader);
  for (const StepReport& report : reports) csv += LineOf(report);
  return csv;
}

std::vector<StepReport> ParseLossesCsv(absl::string_view csv) {
  std::vector<StepReport> reports;
  if (!absl::ConsumePrefix(&csv, kHeader)) return reports;
  for (size_t end = csv.find('\n'); end != absl::string_view::npos; end = csv.find('\n')) {
    const std::optional<StepReport> report = ParseLine(csv.substr(0, end));
    if (!report.has_value()) break;
    // Append writes steps in rising order only, so what comes now is not of this log.
    if (!reports.empty() && report->step <= reports.back().step) break;
    reports.push_back(*report);
    csv.remove_prefix(end + 1);
  }
  return reports;
}

LossLog::~LossLog() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<std::unique_ptr<LossLog>> LossLog::Open(const std::string& directory,
                                                       uint64_t committed_step) {
  std::unique_ptr<LossLog> log(new LossLog(absl::StrCat(directory, "/losses.csv")));
  std::vector<StepReport>& reports = log->reports_;
  reports = ParseLossesCsv(ReadAll(log->path_));
  // A line may be of another run, or of a step that is not committed any more: an older checkpoint
  // was loaded, or the step was undone.
  while (!reports.empty() && reports.back().step > committed_step) reports.pop_back();
  BALLAST_RETURN_IF_ERROR(log->Rewrite());
  return log;
}

absl::Status LossLog::Rewrite() {
  BALLAST_RETURN_IF_ERROR(OutputError(WriteAtomically({{path_, LossesCsv(reports_)}})));
  // The rename has put another file in place of the one that is open: lines appended to that would
  // be lost.
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (descriptor_ >= 0) return absl::OkStatus();
  return OutputError(FileError(errno, "write", path_));
}

absl::Status LossLog::Append(const StepReport& report) {
  if (reports_.empty() || reports_.back().step < report.step) {
    reports_.push_back(report);
    // No fsync: it survives the death of this process, against which it is kept.
    return OutputError(WriteAll(descriptor_, path_, LineOf(report)));
  }
  // A checkpoint of an earlier step was loaded, and this step is done again.
  while (!reports_.empty() && reports_.back().step >= report.step) reports_.pop_back();
  reports_.push_back(report);
  return Rewrite();
}

}  // namespace ballast::worker
