// What rank 0 leaves in --out at the end of the run: worker.json and weights.bin, next to the
// losses.csv of loss_log.h.
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

// Creates the directory, and finds out now whether it can be written.
absl::Status PrepareOutput(const std::string& directory);

struct RunFacts {
  std::vector<StepReport> reports;  // All steps', over all starts of the worker.
  uint64_t steps = 0;               // The last one committed.
  uint32_t micro_steps = 0;
  int workers = 0;
  std::string optimizer;
  std::string transport;                    // Rank 0's optimizer's.
  std::optional<client::JobCounts> counts;  // Where a service counts.
};

std::string WorkerJson(const RunFacts& facts, const TrainingJob& job,
                       const std::string& weights_sha256);

// weights.bin: the final weights of all parameters in order, in the format of the passes,
// little-endian, nothing between them. For a model that is only measured or compared, the hash in
// worker.json is enough.
enum class WeightsFile { kWritten, kHashedOnly };

// The files appear, whole, or, on an error such as a full disk, none.
absl::Status WriteOutput(const std::string& directory, const RunFacts& facts,
                         const TrainingJob& job, TrainingBackend& backend,
                         WeightsFile weights_file = WeightsFile::kWritten);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_RUN_OUTPUT_H_
