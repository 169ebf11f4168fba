// A run's losses.csv, a line for each step, over any number of starts of the worker. A line is
// appended when its step is committed. If a worker crashes between the two, the step has no line.
#ifndef BALLAST_GPU_WORKER_RUN_LOSS_LOG_H_
#define BALLAST_GPU_WORKER_RUN_LOSS_LOG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gpu_worker/training/trainer.h"

namespace ballast::worker {

// Thread-compatible. Errors are UNAVAILABLE naming the file.
class LossLog {
 public:
  // Keeps an earlier start's complete lines of steps up to the committed one.
  static absl::StatusOr<std::unique_ptr<LossLog>> Open(const std::string& directory,
                                                       uint64_t committed_step);
  ~LossLog();
  LossLog(const LossLog&) = delete;
  LossLog& operator=(const LossLog&) = delete;

  // If there are lines of this step and later ones, replaces them: a checkpoint was loaded.
  absl::Status Append(const StepReport& report);
  // All lines, in order of step. Those of an earlier start have only the fields of a line.
  const std::vector<StepReport>& reports() const { return reports_; }

 private:
  explicit LossLog(std::string path) : path_(std::move(path)) {}

  absl::Status Rewrite();

  const std::string path_;
  int descriptor_ = -1;  // The file's, for appending.
  std::vector<StepReport> reports_;
};

std::string LossesCsv(absl::Span<const StepReport> reports);
// The lines of a file that may be truncated: up to the first that is incomplete, or not of a later
// step than the one before.
std::vector<StepReport> ParseLossesCsv(absl::string_view csv);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_LOSS_LOG_H_
