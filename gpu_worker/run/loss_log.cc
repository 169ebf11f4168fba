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

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "gpu_worker/base/log.h"
#include "gpu_worker/run/run_output.h"

namespace ballast::worker {
namespace {

constexpr char kFile[] = "losses.csv";
constexpr char kNote[] = "losses.csv.next";
constexpr char kJob[] = ".losses.csv.job";
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

// "12 3.25\n"
std::optional<StepReport> ParseNote(absl::string_view note) {
  // Without its end the number may be cut off, and a number that is cut off is another number.
  if (!absl::ConsumeSuffix(&note, "\n")) return std::nullopt;
  const std::vector<absl::string_view> words = absl::StrSplit(note, ' ');
  StepReport report;
  if (words.size() != 2 || !absl::SimpleAtoi(words[0], &report.step) ||
      !absl::SimpleAtod(words[1], &report.loss)) {
    return std::nullopt;
  }
  report.norm = report.clip_coefficient = kUnknown;
  report.tokens_per_second = report.seconds = kUnknown;
  report.times = {kUnknown, kUnknown, kUnknown, kUnknown, kUnknown};
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

LossLog::LossLog(const std::string& directory)
    : path_(absl::StrCat(directory, "/", kFile)), note_path_(absl::StrCat(directory, "/", kNote)) {}

LossLog::~LossLog() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<std::unique_ptr<LossLog>> LossLog::Open(const std::string& directory,
                                                       const std::string& job_uid,
                                                       uint64_t committed_step, bool resumes) {
  std::unique_ptr<LossLog> log(new LossLog(directory));
  const std::string job_path = absl::StrCat(directory, "/", kJob);
  if (!job_uid.empty() && ReadAll(job_path) == job_uid) {
    // The note is left: if this start dies before Rewrite is done, the next one needs it again.
    log->TakeOver(committed_step);
    BALLAST_RETURN_IF_ERROR(log->Rewrite());
    return log;
  }
  if (resumes && committed_step > 0) {
    // Without the note, which may be of a step that was done again.
    unlink(log->note_path_.c_str());
    log->TakeOver(committed_step);
  }
  if (log->reports_.empty() && !ParseLossesCsv(ReadAll(log->path_)).empty()) {
    Log().info("{} is of another job; it is begun again", log->path_);
  }
  // In this order: lines and a note of another job are never next to this one's name.
  // A start that dies between these calls leaves no name, and the next one comes here again.
  unlink(job_path.c_str());
  unlink(log->note_path_.c_str());
  BALLAST_RETURN_IF_ERROR(log->Rewrite());
  if (!job_uid.empty()) {
    BALLAST_RETURN_IF_ERROR(OutputError(WriteAtomically({{job_path, job_uid}})));
  }
  return log;
}

void LossLog::TakeOver(uint64_t committed_step) {
  reports_ = ParseLossesCsv(ReadAll(path_));
  // A line may be of a step that is not committed any more: an older checkpoint was loaded, or the
  // step was undone.
  while (!reports_.empty() && reports_.back().step > committed_step) reports_.pop_back();
  const std::optional<StepReport> noted = ParseNote(ReadAll(note_path_));
  // Only the step after the last line can be without one.
  // A worker that dies is one step behind at most, since it appends a step's line before it seals
  // the next one.
  const uint64_t missing = reports_.empty() ? committed_step : reports_.back().step + 1;
  if (noted.has_value() && noted->step == missing && missing <= committed_step) {
    reports_.push_back(*noted);
  }
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

absl::Status LossLog::Note(uint64_t step, double loss) {
  // A torn note belongs to a step that is not sealed, so it is not needed.
  // There is no fsync, here and in Append: what was written survives the death of this process,
  // against which it is kept.
  const int note = open(note_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (note < 0) return OutputError(FileError(errno, "write", note_path_));
  // The note has as many digits as a line, so that a line made of it has the same loss.
  const absl::Status status =
      WriteAll(note, note_path_, absl::StrFormat("%d %.9g\n", step, Plain(loss)));
  close(note);
  return OutputError(status);
}

absl::Status LossLog::Append(const StepReport& report) {
  if (reports_.empty() || reports_.back().step < report.step) {
    reports_.push_back(report);
    return OutputError(WriteAll(descriptor_, path_, LineOf(report)));
  }
  // A checkpoint of an earlier step was loaded, and this step is done again.
  while (!reports_.empty() && reports_.back().step >= report.step) reports_.pop_back();
  reports_.push_back(report);
  return Rewrite();
}

void LossLog::Finish() { unlink(note_path_.c_str()); }

}  // namespace ballast::worker
