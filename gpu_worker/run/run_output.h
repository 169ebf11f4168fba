// Rank 0's files in --out at the end of the run: worker.json and weights.bin, beside the losses.csv
// of loss_log.h.
#ifndef BALLAST_GPU_WORKER_RUN_RUN_OUTPUT_H_
#define BALLAST_GPU_WORKER_RUN_RUN_OUTPUT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/session.h"
#include "gpu_worker/training/backend.h"
#include "gpu_worker/training/trainer.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

// The error of a file under --out, as UNAVAILABLE, which also names the flag. OK stays OK.
absl::Status OutputError(const absl::Status& status);

// Creates the directory, and tests now whether it is writable.
absl::Status PrepareOutput(const std::string& directory);

struct RunFacts {
  std::vector<StepReport> reports;  // All steps', over all starts of the worker.
  uint64_t steps = 0;               // The last one committed.
  uint32_t micro_steps = 0;
  int workers = 0;
  std::string optimizer;
  std::string transport;                    // Rank 0's optimizer's.
  std::optional<client::JobCounts> counts;  // Absent without a service.
};

std::string WorkerJson(const RunFacts& facts, const TrainingJob& job);

// weights.bin: the final weights of all parameters in order, in the format of the passes,
// little-endian, without gaps. The files appear complete. After an error such as a full disk no
// file appears.
absl::Status WriteOutput(const std::string& directory, const RunFacts& facts,
                         const TrainingJob& job, TrainingBackend& backend);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_RUN_OUTPUT_H_
