// A run's losses.csv, a line for each step, over any number of starts of the worker.
//
// Lines are appended as steps are committed. A worker may die between a step's commit and its line:
// the step's loss is noted in another file before the seal, and the next start appends the line
// with it, with nan for what is not known any more. That file, .losses.csv.job, names the job, too.
#ifndef BALLAST_GPU_WORKER_RUN_LOSS_LOG_H_
#define BALLAST_GPU_WORKER_RUN_LOSS_LOG_H_

#include <cstdint>
#include <memory>
#include <string>
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
  // `job_uid`: empty if no other start can have the same job. Takes over what an earlier start of
  // the same job left in the directory: whole lines of steps up to the committed one, and its note.
  // Removes everything else. `resumes`: the job may go on from a checkpoint, so also another job's
  // lines are of the same run.
  static absl::StatusOr<std::unique_ptr<LossLog>> Open(const std::string& directory,
                                                       const std::string& job_uid,
                                                       uint64_t committed_step,
                                                       bool resumes = false);
  ~LossLog();
  LossLog(const LossLog&) = delete;
  LossLog& operator=(const LossLog&) = delete;

  // Before the step is sealed.
  absl::Status Note(uint64_t step, double loss);
  // Replaces the lines of this step and later ones, if there are any: a checkpoint was loaded.
  absl::Status Append(const StepReport& report);
  // All lines, in order of step. Those of an earlier start have only the fields of a line.
  const std::vector<StepReport>& reports() const { return reports_; }

 private:
  LossLog(const std::string& directory, const std::string& job_uid);

  absl::Status Rewrite();

  const std::string path_;
  const std::string job_path_;
  const std::string job_uid_;
  int descriptor_ = -1;      // The file's, for appending.
  int job_descriptor_ = -1;  // -1: no other start can have the same job.
  std::vector<StepReport> reports_;
};

std::string LossesCsv(absl::Span<const StepReport> reports);
// The lines of a file that may end anywhere: up to the first that is not whole, or not of a later
// step than the one before.
std::vector<StepReport> ParseLossesCsv(absl::string_view csv);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_LOSS_LOG_H_
