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

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
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

// What the other file has: the job, and the step that was noted last with its loss. Blanks make each
// note as long as every other, so that one is written over another whole.
std::string NoteOf(absl::string_view job_uid, uint64_t step, double loss) {
  // As many digits as a line has, so that a line made of it has the same loss.
  return absl::StrFormat("%s %20d %20.9g\n", job_uid, step, Plain(loss));
}

std::optional<StepReport> ParseNote(absl::string_view note) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(absl::StripAsciiWhitespace(note), ' ', absl::SkipEmpty());
  const size_t count = words.size();
  StepReport report;
  if (count < 3 || !absl::SimpleAtoi(words[count - 2], &report.step) || report.step == 0 ||
      !absl::SimpleAtod(words[count - 1], &report.loss)) {
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

LossLog::LossLog(const std::string& directory, const std::string& job_uid)
    : path_(absl::StrCat(directory, "/", kFile)),
      job_path_(absl::StrCat(directory, "/", kJob)),
      job_uid_(job_uid) {}

LossLog::~LossLog() {
  if (descriptor_ >= 0) close(descriptor_);
  if (job_descriptor_ >= 0) close(job_descriptor_);
}

absl::StatusOr<std::unique_ptr<LossLog>> LossLog::Open(const std::string& directory,
                                                       const std::string& job_uid,
                                                       uint64_t committed_step, bool resumes) {
  std::unique_ptr<LossLog> log(new LossLog(directory, job_uid));
  std::vector<StepReport>& reports = log->reports_;
  reports = ParseLossesCsv(ReadAll(log->path_));
  const std::string note = ReadAll(log->job_path_);
  const bool same_job = !job_uid.empty() && absl::StartsWith(note, absl::StrCat(job_uid, " "));
  if (same_job || (resumes && committed_step > 0)) {
    // A line may be of a step that is not committed any more: an older checkpoint was loaded, or the
    // step was undone.
    while (!reports.empty() && reports.back().step > committed_step) reports.pop_back();
    const std::optional<StepReport> noted = ParseNote(note);
    // Only the step after the last line can be without one.
    // A worker that dies is one step behind at most, since it appends a step's line before it seals
    // the next one.
    const uint64_t missing = reports.empty() ? committed_step : reports.back().step + 1;
    if (noted.has_value() && noted->step == missing && missing <= committed_step) {
      reports.push_back(*noted);
    }
  } else if (!reports.empty()) {
    Log().info("{} is of another job; it is begun again", log->path_);
    reports.clear();
  }
  BALLAST_RETURN_IF_ERROR(log->Rewrite());
  if (job_uid.empty()) return log;
  // Behind the lines: a start that dies before this one leaves another job's name, or the same
  // job's, and the next start comes here again.
  if (!same_job) {
    BALLAST_RETURN_IF_ERROR(
        OutputError(WriteAtomically({{log->job_path_, NoteOf(job_uid, 0, kUnknown)}})));
  }
  log->job_descriptor_ = open(log->job_path_.c_str(), O_WRONLY | O_CLOEXEC);
  if (log->job_descriptor_ >= 0) return log;
  return OutputError(FileError(errno, "write", log->job_path_));
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
  if (job_descriptor_ < 0) return absl::OkStatus();
  // There is no fsync, here and in Append: what was written survives the death of this process,
  // against which it is kept.
  const std::string note = NoteOf(job_uid_, step, loss);
  if (pwrite(job_descriptor_, note.data(), note.size(), 0) == static_cast<ssize_t>(note.size())) {
    return absl::OkStatus();
  }
  return OutputError(FileError(errno, "write", job_path_));
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

}  // namespace ballast::worker
