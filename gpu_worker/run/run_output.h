// What rank 0 leaves under --out when the run is over: worker.json and weights.bin, beside the
// losses.csv that loss_log.h keeps.
#ifndef BALLAST_GPU_WORKER_RUN_RUN_OUTPUT_H_
#define BALLAST_GPU_WORKER_RUN_RUN_OUTPUT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
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
  std::vector<StepReport> reports;  // Of the whole run, of all starts of the worker.
  uint64_t steps = 0;               // The last one committed.
  uint32_t micro_steps = 0;
  int workers = 0;
  std::string optimizer;
  std::string transport;                    // As rank 0's optimizer says it.
  std::optional<client::JobCounts> counts;  // Where a service counts.
};

// The SHA-256 of what these have one after another.
std::string Sha256Hex(absl::Span<const absl::string_view> parts);
std::string WorkerJson(const RunFacts& facts, const TrainingJob& job,
                       const std::string& weights_sha256);

// weights.bin: the final weights of all parameters in order, in the format of the passes,
// little-endian, nothing between them. Of a model that is only measured or compared, its hash in
// worker.json is enough, and gigabytes need not be written.
enum class WeightsFile { kWritten, kHashedOnly };

// The files appear, whole, or, on an error such as a full disk, none.
absl::Status WriteOutput(const std::string& directory, const RunFacts& facts,
                         const TrainingJob& job, TrainingBackend& backend,
                         WeightsFile weights_file = WeightsFile::kWritten);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_RUN_RUN_OUTPUT_H_
